"""Tools for trained models: each is a command, and a function of the same arguments."""

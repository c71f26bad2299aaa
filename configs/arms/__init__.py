"""Techniques as files of a user: each is one arm of a study, and no file of ours is changed."""

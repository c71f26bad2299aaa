"""What is drawn of runs and models, with matplotlib: slow to import, and so only where something is drawn."""

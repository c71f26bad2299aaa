"""Trained models, our own and published ones: opened, written for others, and as a warm start of another training."""

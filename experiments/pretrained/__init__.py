"""Trained models, our own and published ones: open them, write them for others, begin training with them."""

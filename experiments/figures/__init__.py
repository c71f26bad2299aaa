"""Figures of runs and models. matplotlib is slow to import, so import these modules inside functions that draw."""

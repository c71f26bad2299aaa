"""Figures of runs and models. matplotlib is slow to import: import these modules only where something is drawn."""

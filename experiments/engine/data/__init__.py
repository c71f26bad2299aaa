"""Where text and images come from, how they are split and read, and how batches become functions of (seed, step)."""

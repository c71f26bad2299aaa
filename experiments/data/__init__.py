"""Where text and images come from, how they are split and read."""

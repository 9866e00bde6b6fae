"""The control plane: scheduling, numbered steps, and the life of the rank group; never imports torch."""

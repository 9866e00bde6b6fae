"""The HTTP service: a torch-free API process in front of the engine's controller."""

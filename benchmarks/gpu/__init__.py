"""What the pieces of the GPU check are made of, and those that measure; those about right or wrong are in tests/gpu."""

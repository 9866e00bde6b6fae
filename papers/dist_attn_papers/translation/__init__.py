"""Encoder-decoders, their search by beams, and their training on parallel text."""

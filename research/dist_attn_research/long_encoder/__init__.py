"""The encoder that ships: MiniLM over blocks, and one layer behind it that learns what the text before says."""

"""The command line: its commands, what they share, and the start of a whole service."""

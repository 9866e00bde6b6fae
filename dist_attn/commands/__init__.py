"""Commands that the command line registers: what they share, and a group of them."""

"""Token mixers of the papers: a configuration and a module for each family."""

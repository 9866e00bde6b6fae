"""Sessions over HTTP: what a model knows of a text, kept in the store between requests, processes and machines."""

"""Sessions over HTTP: a model's state of a text, kept in the store between requests, processes and machines."""

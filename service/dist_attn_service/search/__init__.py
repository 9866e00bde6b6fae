"""Passages that answer a query, found by their words and by their vectors; documents in order of how well they do."""

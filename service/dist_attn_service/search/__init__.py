"""Passages that answer a query, found by their words and vectors; documents in order of how well they answer it."""

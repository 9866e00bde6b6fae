"""Uploads that feed a session while they arrive."""

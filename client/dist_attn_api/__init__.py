"""What the service, its engine and its clients share: errors and the JSON of answers. It needs no other package."""

__version__ = "0.1.0"

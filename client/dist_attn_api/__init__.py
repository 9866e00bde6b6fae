"""The errors and the JSON of answers that the service, its engine and its clients share; needs no other package."""

__version__ = "0.1.0"

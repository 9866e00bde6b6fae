"""The JSON that goes in and out, a module for each family of routes."""

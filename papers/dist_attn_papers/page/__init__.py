"""The web page under load, measured in a Chromium."""

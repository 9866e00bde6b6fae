"""Images as sequences of patches: classification, and filling in hidden patches."""

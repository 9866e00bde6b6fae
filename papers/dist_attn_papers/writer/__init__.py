"""The model that writes: its texts in several layouts, and a larger model that begins with a smaller one's weights."""

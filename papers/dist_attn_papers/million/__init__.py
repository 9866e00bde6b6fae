"""The million-scale model: few tokens are kept, experts attend to theirs, and all mix globally."""

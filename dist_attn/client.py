"""The typed HTTP client as part of this package; `client/` is a distribution of its own that needs no torch."""

from dist_attn_client import *  # noqa: F403
from dist_attn_client import __all__ as __all__

"""dist-attn: exact sequence-sharded attention with a constant-size state, and a service around it."""

from dist_attn_api import __version__ as __version__

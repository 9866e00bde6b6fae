"""dist-attn: exact sequence-sharded attention with a constant-size state, and a service around it."""

__version__ = "0.1.0"

"""dist-attn: exact sequence-sharded attention with a constant-size state, and a service around it."""

from importlib import import_module

from dist_attn_api import __version__ as __version__

__all__ = ["__version__", "context_parallel"]


def __getattr__(name: str) -> object:
    # Neither torch nor transformers is loaded before it is asked for, and what needs neither imports this module too.
    if name == "context_parallel":
        return import_module("dist_attn.adapters.context_parallel").context_parallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

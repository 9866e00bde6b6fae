"""The papers' kinds of models, registered as they are read; no torch."""

from dist_attn_papers.million import config as million
from dist_attn_papers.translation import config as translation
from dist_attn_papers.vision import config as vision

__all__ = ["million", "translation", "vision"]

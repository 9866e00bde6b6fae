"""The options of attention over a memory."""

from typing import Literal

from dist_attn.model_config.mixers.attention import AttentionConfig


class CrossConfig(AttentionConfig):
    """Attention of a decoder's tokens over all tokens of a memory."""

    kind: Literal["cross"] = "cross"

"""Linear layers whose results do not depend on how many tokens there are: they run over blocks of tokens, one by one.

A matrix product of 512 rows and one of 2,048 rows may round the same row differently. In blocks of one size, anchored
at the first token, a row has the same bits wherever a sequence is cut between blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dist_attn.ops.linear_attention.attention import chunk_ranges

__all__ = ["RowBlocks"]


class RowBlocks(TorchFunctionMode):
    """Within it, `F.linear` of [..., L, D] takes chunks of tokens one after the other.

    For everything else a model does to tokens one by one (norms, activations, embeddings) a row's bits do not depend on
    the other rows anyway.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or args[0].dim() < 2:
            return func(*args, **kwargs)
        x, *rest = args
        parts = [func(x[..., a:b, :].contiguous(), *rest, **kwargs) for a, b in chunk_ranges(x.shape[-2])]
        return torch.cat(parts, dim=-2) if parts else func(x, *rest, **kwargs)

"""What the ranks' calls of one operation must have in common, compared before anything of it travels.

A rank that leaves out a gate, takes another denominator or another scale sends messages of the size that the others
expect: without the comparison the result is wrong and nobody knows. Between processes a message of another size or
dtype ends the process of the rank that receives it.
"""

from collections.abc import Mapping

import torch

from dist_attn import __version__
from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, FeatureMap
from dist_attn.sharded.prefix_scan import Exchange

__all__ = ["Setting", "agree_on_call", "layouts_in_words"]

Setting = bool | int | float | str | Denominator | FeatureMap | torch.Tensor | None


def agree_on_call(
    comm: Communicator,
    operation: str,
    along: Mapping[str, torch.Tensor | None],
    dim: int,
    settings: Mapping[str, Setting],
) -> None:
    """Make sure that every rank calls `operation` with tensors of the same kind and the same settings.

    `along` are the tensors that are cut across ranks at dimension `dim`, the only size that may differ; tensors among
    the settings are compared in shape and dtype. In a compiled graph nothing is compared.

    Cost: 32 bytes to each other rank the first time that a communicator sees such a call, then nothing.
    Raises: MismatchError on every rank, with what differs first.
    """
    if comm.size == 1 or torch.compiler.is_compiling():
        return
    words = [f"{name}={_kind(x, dim)}" for name, x in along.items()]
    words += [f"{name}={_word(value)}" for name, value in settings.items()]
    comm.agree_once(f"arguments of {operation}", " ".join(words))


def layouts_in_words(
    layout: SequenceLayout, memory: SequenceLayout, exchange: Exchange, choices: Mapping[str, object]
) -> str:
    """All that ranks must have in common before they call anything, of which the first that differs can be named."""
    words = {
        "version": __version__,
        "exchange": exchange.algorithm,
        "pieces": exchange.pieces,
        "hosts": ";".join("+".join(map(str, host)) for host in exchange.hosts) or "none",
        **choices,
    }
    named = " ".join(f"{name}={value}" for name, value in words.items())
    return f"{named} {layout.description} {' '.join(f'memory_{word}' for word in memory.description.split(' '))}"


def _kind(x: torch.Tensor | None, dim: int | None = None) -> str:
    """Dtype and shape, without the size of dimension `dim`."""
    if x is None:
        return "none"
    sizes = ["any" if at == dim else str(size) for at, size in enumerate(x.shape)]
    return f"{str(x.dtype).removeprefix('torch.')}[{'x'.join(sizes)}]"


def _word(value: Setting) -> str:
    if isinstance(value, torch.Tensor):
        return _kind(value)
    if isinstance(value, Denominator):
        return f"{value.kind}:{value.eps!r}"
    if value is None or isinstance(value, bool | int | float | str):
        return str(value).lower().replace(" ", "_")
    return "+".join([type(value).__name__, *map(_kind, value.tensors())])

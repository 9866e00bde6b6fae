"""Where slices of layouts stand: positions and documents of queries and keys, as attention over tiles needs them."""

from collections.abc import Sequence

import torch

from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.ops.softmax_attention import Placement
from dist_attn.sharded.block_table import Range

__all__ = ["documents_at", "placement_of"]


def placement_of(
    queries: Sequence[Range], keys: Sequence[Range], layout: SequenceLayout, memory: SequenceLayout
) -> Placement:
    """The placement of some ranges of queries on `layout` over some ranges of keys on `memory`.

    Raises: InputError when only one of the layouts has documents.
    """
    if (layout.documents is None) != (memory.documents is None):
        raise InputError(
            "queries have documents and the memory has none, or the other way round; give both, or neither"
        )
    queries_L, keys_S = _positions(queries), _positions(keys)
    return Placement(queries_L, keys_S, documents_at(layout, queries_L), documents_at(memory, keys_S))


def documents_at(layout: SequenceLayout, positions: torch.Tensor) -> torch.Tensor | None:
    """The number of the document that each position belongs to; None where the layout has no documents."""
    if layout.documents is None:
        return None
    return torch.bucketize(positions, torch.tensor(layout.documents, dtype=torch.int64), right=True)


def _positions(ranges: Sequence[Range]) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])

"""Where slices of layouts stand: positions and documents of queries and keys, as attention over tiles needs them."""

from collections.abc import Sequence

import torch

from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.ops.softmax_attention import Placement
from dist_attn.sharded.block_table import Range

__all__ = ["placement_of"]


def placement_of(
    queries: Sequence[Range], keys: Sequence[Range], layout: SequenceLayout, memory: SequenceLayout
) -> Placement:
    """The placement of some ranges of queries on `layout` over some ranges of keys on `memory`.

    Raises: InputError when only one of the layouts has documents.
    """
    queries_L, keys_S = _positions(queries), _positions(keys)
    if not layout.documents and not memory.documents:
        return Placement(queries_L, keys_S)
    if layout.documents is None or memory.documents is None:
        raise InputError(
            "queries have documents and the memory has none, or the other way round; give both, or neither"
        )
    return Placement(
        queries_L, keys_S, _documents_at(layout.documents, queries_L), _documents_at(memory.documents, keys_S)
    )


def _documents_at(starts: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
    """The number of the document that each position belongs to."""
    return torch.bucketize(positions, torch.tensor(starts, dtype=torch.int64), right=True)


def _positions(ranges: Sequence[Range]) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])

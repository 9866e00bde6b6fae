"""The tokens of a rank's slice, and from its hidden states the pieces of rows that lie in it."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dist_attn.generation import sequence_scores
from dist_attn.rank_link.rows import piece_edges
from dist_attn.text.cuts import unmarked
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import PrefillOp, RowPieces

SCORED_AT_ONCE = 64  # tokens whose logits are there at the same time; it divides the grid on which ranks are cut


def tokens_of(op: PrefillOp) -> torch.Tensor:
    """The tokens of this rank's slice without the marks of rows' ends, on the CPU."""
    return torch.from_numpy(unmarked(np.frombuffer(op.tokens, dtype="<i4")).astype(np.int64))


def reduce_to_pieces(
    h_LD: torch.Tensor, start: int, request: int, spec: RowSpec, ends: Sequence[int] = ()
) -> RowPieces:
    """Sums (pooling mean) or last vectors of the row pieces in tokens [start, start + L), as float32.

    Marked rows end at the positions `ends`.

    A piece is always summed as one contiguous run in one order, so it has the same bits on any number of ranks.
    """
    length = h_LD.shape[0]
    if not length:
        return RowPieces(request, [], [], b"")
    h_LD = h_LD.to(device="cpu", dtype=torch.float32)
    edges = piece_edges(start, start + length, spec, ends)
    starts, stops = edges[:-1].tolist(), edges[1:].tolist()
    if len(starts) == length:
        vectors_ND = h_LD
    elif spec.pooling == "last":
        vectors_ND = h_LD[torch.from_numpy(edges[1:] - start - 1)]
    else:
        sizes = [b - a for a, b in zip(starts, stops, strict=True)]
        vectors_ND = torch.stack([run_CD.sum(dim=0) for run_CD in h_LD.split(sizes)])
    data = vectors_ND.contiguous().numpy().astype("<f4", copy=False).tobytes()
    return RowPieces(request, starts, stops, data, list(ends))


def score_pieces(
    readout: Callable[[torch.Tensor], torch.Tensor],
    h_LD: torch.Tensor,
    targets_L: torch.Tensor,
    start: int,
    request: int,
    count: int,
) -> RowPieces:
    """A row for each of the tokens [start, start + L): the scores of the one that follows it, which is its target.

    Logits are made on the absolute grid of SCORED_AT_ONCE tokens, so a row has the same bits on any number of ranks and
    memory does not grow with the block.
    """
    cuts = [0, *range(SCORED_AT_ONCE - start % SCORED_AT_ONCE, len(h_LD), SCORED_AT_ONCE), len(h_LD)]
    scores = [
        # Slices of one sequence, since [B, D] would be a step of as many sequences.
        sequence_scores(readout(h_LD[None, a:b])[0], targets_L[a:b], count)
        for a, b in itertools.pairwise(cuts)
    ]
    positions = list(range(start, start + len(h_LD) + 1))
    return RowPieces(request, positions[:-1], positions[1:], torch.cat(scores).numpy().astype("<f4").tobytes())

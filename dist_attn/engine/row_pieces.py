"""From a rank's hidden states to the pieces of rows that lie in its slice."""

import torch

from dist_attn.control.rows import piece_edges
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import RowPieces

__all__ = ["reduce_to_pieces"]


def reduce_to_pieces(h_LD: torch.Tensor, start: int, session: int, spec: RowSpec) -> RowPieces:
    """Sums (pooling mean) or last vectors of the row pieces in tokens [start, start + L), as float32.

    A piece is always summed as one contiguous run in one order, so it has the same bits on any number of ranks.
    """
    length = h_LD.shape[0]
    if not length:
        return RowPieces(session, [], [], b"")
    h_LD = h_LD.to(device="cpu", dtype=torch.float32)
    edges = piece_edges(start, start + length, spec)
    starts, stops = edges[:-1].tolist(), edges[1:].tolist()
    if len(starts) == length:
        vectors_ND = h_LD
    elif spec.pooling == "last":
        vectors_ND = h_LD[torch.from_numpy(edges[1:] - start - 1)]
    else:
        sizes = [b - a for a, b in zip(starts, stops, strict=True)]
        vectors_ND = torch.stack([run_CD.sum(dim=0) for run_CD in h_LD.split(sizes)])
    return RowPieces(session, starts, stops, vectors_ND.contiguous().numpy().astype("<f4", copy=False).tobytes())

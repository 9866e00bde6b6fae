"""What one rank sends, forward, in sharded operations that mix along the sequence; backward is the transposed exchange.

Letters are the glossary's: B batch, L tokens, D channels, N modes, P ranks. `numbers_bytes` are those of one token in
one column: B times the size of an element for channels.
"""

from collections.abc import Sequence

from dist_attn.costs.exchanges import all_gather_bytes


def reshuffle_bytes(lengths: Sequence[int], columns: int, numbers_bytes: int, rank: int) -> int:
    """From tokens to columns: L local tokens of the columns that other ranks take."""
    return lengths[rank] * (columns - _own_columns(columns, len(lengths), rank)) * numbers_bytes


def reshuffle_back_bytes(lengths: Sequence[int], columns: int, numbers_bytes: int, rank: int) -> int:
    """From columns to tokens: the other ranks' tokens of this rank's columns."""
    return (sum(lengths) - lengths[rank]) * _own_columns(columns, len(lengths), rank) * numbers_bytes


def diagonal_scan_bytes(batch: int, channels: int, modes: int, ranks: int, *, real_bytes: int = 4) -> int:
    """(P - 1) (2 B D N + 2) real numbers by an all-gather: a complex state and its tokens, whatever the length."""
    return all_gather_bytes(real_bytes * (2 * batch * channels * modes + 2), ranks)


def halo_bytes(batch: int, channels: int, taps: int, ranks: int, *, real_bytes: int = 4) -> int:
    """(P - 1) (K - 1) B D numbers: the edge tokens of a short convolution, causal, centred or streaming."""
    return all_gather_bytes(real_bytes * batch * (taps - 1) * channels, ranks)


def relative_attention_bytes(
    groups: int,
    features: int,
    values: int,
    reach: int,
    ranks: int,
    *,
    causal: bool,
    behind: bool = False,
    real_bytes: int = 4,
) -> int:
    """(P - 1) (M + n max(k, 1)) (V + 1) numbers for each of `groups` batch elements x heads.

    n is the number of windows: 1 when causal, else 2, and 3 where keys lie `behind` the last query.
    """
    windows = 1 if causal else 2 + behind
    return all_gather_bytes(
        real_bytes * groups * relative_state_numbers(features, values, reach, windows=windows), ranks
    )


def relative_state_numbers(features: int, values: int, reach: int, *, windows: int = 1) -> int:
    """(M + n max(k, 1)) (V + 1): the kernel sum and n windows of one batch element and head."""
    return (features + windows * max(reach, 1)) * (values + 1)


def realignment_bytes(source: Sequence[int], target: Sequence[int], token_bytes: int, rank: int) -> int:
    """The tokens of this rank that stand on another one in the target layout; those behind its end stay."""
    start, end = sum(source[:rank]), sum(target)
    kept = max(0, min(start + source[rank], sum(target[: rank + 1])) - max(start, sum(target[:rank])))
    return (max(0, min(start + source[rank], end) - start) - kept) * token_bytes


def _own_columns(columns: int, ranks: int, rank: int) -> int:
    share, extra = divmod(columns, ranks)
    return share + (rank < extra)

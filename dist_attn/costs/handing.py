"""How long a block's tokens take from rank 0 to the ranks, and the rows' pieces from the ranks back to rank 0."""

from dist_attn.costs.exchanges import Link

__all__ = ["handing_seconds"]

TOKEN_BYTES = 4


def handing_seconds(ranks: int, block_tokens: int, row_bytes: int, link: Link) -> float:
    """Two broadcasts of ceil(log2 P) steps, the second with P L tokens; P - 1 messages each of counts, ranges and rows.

    `block_tokens` is L, `row_bytes` what one rank sends back. One rank hands nothing to anybody.
    """
    if ranks == 1:
        return 0.0
    steps = (ranks - 1).bit_length()
    tokens_s = steps * (2 * link.latency_s + TOKEN_BYTES * ranks * block_tokens / link.bytes_per_s)
    return tokens_s + (ranks - 1) * (3 * link.latency_s + row_bytes / link.bytes_per_s)

"""Selection of tokens by their scores: the oracle by definition and the fast form."""

from dist_attn.ops.token_selection.naive import select_tokens_naive
from dist_attn.ops.token_selection.select import (
    check_selection,
    comparable,
    first_of_highest,
    highest_scores,
    select_tokens,
    share_of_highest,
)

__all__ = [
    "check_selection",
    "comparable",
    "first_of_highest",
    "highest_scores",
    "select_tokens",
    "select_tokens_naive",
    "share_of_highest",
]

"""Affine recurrences: the state as a monoid, the oracle, the form in chunks, and the decode step."""

from dist_attn.ops.affine.call import AffineCall, Read
from dist_attn.ops.affine.recurrence import (
    absorb,
    affine_recurrence,
    affine_recurrence_naive,
    affine_step,
    gated_delta_rule,
    gated_delta_rule_naive,
    gated_delta_step,
    recur,
    recur_by_chunks,
)
from dist_attn.ops.affine.state import AffineState

__all__ = [
    "AffineCall",
    "AffineState",
    "Read",
    "absorb",
    "affine_recurrence",
    "affine_recurrence_naive",
    "affine_step",
    "gated_delta_rule",
    "gated_delta_rule_naive",
    "gated_delta_step",
    "recur",
    "recur_by_chunks",
]

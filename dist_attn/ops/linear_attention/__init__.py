"""Linear (kernel) attention: the oracle, the streaming form with flat memory, and the decode step."""

from dist_attn.ops.linear_attention.implementation import (
    Choice,
    Implementation,
    check_choice,
    check_implementation,
    choose,
    choose_step,
    why_no_library,
)
from dist_attn.ops.linear_attention.joined import PartedSequence, Rooms
from dist_attn.ops.linear_attention.naive import linear_attention_naive
from dist_attn.ops.linear_attention.native_call import half_products
from dist_attn.ops.linear_attention.native_walks import TwoWalks
from dist_attn.ops.linear_attention.split import complete_sums, local_sums, tokens_until_forgotten
from dist_attn.ops.linear_attention.step import linear_attention_read, linear_attention_step
from dist_attn.ops.linear_attention.streaming import absorb_keys, check_shapes, linear_attention, state_dtype

__all__ = [
    "Choice",
    "Implementation",
    "PartedSequence",
    "Rooms",
    "TwoWalks",
    "absorb_keys",
    "check_choice",
    "check_implementation",
    "check_shapes",
    "choose",
    "choose_step",
    "complete_sums",
    "half_products",
    "linear_attention",
    "linear_attention_naive",
    "linear_attention_read",
    "linear_attention_step",
    "local_sums",
    "state_dtype",
    "tokens_until_forgotten",
    "why_no_library",
]

"""Linear (kernel) attention: the oracle, the streaming form with flat memory, C and GPU kernels, the decode step."""

from dist_attn.ops.linear_attention.attention import absorb, absorb_keys, attend, linear_attention
from dist_attn.ops.linear_attention.call import (
    Attend,
    LinearCall,
    OutputBuffers,
    check_prefix,
    prefix_then_causal,
    state_dtype,
)
from dist_attn.ops.linear_attention.implementation import (
    Choice,
    check_choice,
    check_implementation,
    choose,
    kernels_taken,
    why_no_library,
)
from dist_attn.ops.linear_attention.native import TwoWalks
from dist_attn.ops.linear_attention.native_call import half_products
from dist_attn.ops.linear_attention.split import SplitSequence, complete_sums, local_sums, tokens_until_forgotten
from dist_attn.ops.linear_attention.step import linear_attention_naive, linear_attention_read, linear_attention_step
from dist_attn.ops.sequence_call import Implementation

__all__ = [
    "Attend",
    "Choice",
    "Implementation",
    "LinearCall",
    "OutputBuffers",
    "SplitSequence",
    "TwoWalks",
    "absorb",
    "absorb_keys",
    "attend",
    "check_choice",
    "check_implementation",
    "check_prefix",
    "choose",
    "kernels_taken",
    "complete_sums",
    "half_products",
    "linear_attention",
    "linear_attention_naive",
    "linear_attention_read",
    "linear_attention_step",
    "local_sums",
    "prefix_then_causal",
    "state_dtype",
    "tokens_until_forgotten",
    "why_no_library",
]

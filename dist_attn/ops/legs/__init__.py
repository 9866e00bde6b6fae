"""The memory of the whole past by HiPPO-LegS: the oracle, the chunked form, a step, and the signal it remembers."""

from dist_attn.ops.legs.chunked import absorb_signal, legs_memory, legs_step, transition_of
from dist_attn.ops.legs.naive import legs_memory_naive, reconstruct_naive
from dist_attn.ops.legs.reconstruct import reconstruct
from dist_attn.ops.legs.state import LegsState

__all__ = [
    "LegsState",
    "absorb_signal",
    "legs_memory",
    "legs_memory_naive",
    "legs_step",
    "reconstruct",
    "reconstruct_naive",
    "transition_of",
]

"""Short depthwise convolution: the oracle and the direct form."""

from dist_attn.ops.convolution.direct import check_taps, convolve, convolve_padded, convolve_streaming, tail_of
from dist_attn.ops.convolution.naive import convolve_naive
from dist_attn.ops.convolution.packed import convolve_numbered, packed_convolve, packed_convolve_streaming

__all__ = [
    "check_taps",
    "convolve",
    "convolve_naive",
    "convolve_numbered",
    "convolve_padded",
    "convolve_streaming",
    "packed_convolve",
    "packed_convolve_streaming",
    "tail_of",
]

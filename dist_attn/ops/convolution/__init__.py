"""Short depthwise convolution: the oracle and the direct form."""

from dist_attn.ops.convolution.direct import check_taps, convolve, convolve_padded, convolve_streaming, tail_of
from dist_attn.ops.convolution.naive import convolve_naive

__all__ = ["check_taps", "convolve", "convolve_naive", "convolve_padded", "convolve_streaming", "tail_of"]

"""Convolution with a kernel as long as the sequence: the oracle and the form by the fast Fourier transform."""

from dist_attn.ops.long_convolution.fft import long_convolve
from dist_attn.ops.long_convolution.naive import long_convolve_naive
from dist_attn.ops.long_convolution.packed import packed_long_convolve

__all__ = ["long_convolve", "long_convolve_naive", "packed_long_convolve"]

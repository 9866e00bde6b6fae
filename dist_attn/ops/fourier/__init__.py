"""Fourier token mixing (FNet): the oracle by definition and the fast form."""

from dist_attn.ops.fourier.fft import FourierNorm, fourier_mix
from dist_attn.ops.fourier.naive import fourier_mix_naive

__all__ = ["FourierNorm", "fourier_mix", "fourier_mix_naive"]

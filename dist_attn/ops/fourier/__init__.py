"""Fourier token mixing (FNet): the oracle by definition and the fast form."""

from dist_attn.ops.fourier.fft import FourierNorm, fourier_mix
from dist_attn.ops.fourier.naive import fourier_mix_naive
from dist_attn.ops.fourier.packed import document_lengths, packed_fourier_mix

__all__ = ["FourierNorm", "document_lengths", "fourier_mix", "fourier_mix_naive", "packed_fourier_mix"]

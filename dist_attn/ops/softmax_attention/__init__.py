"""Softmax attention: the oracle and PyTorch's fused kernels."""

from dist_attn.ops.softmax_attention.fused import softmax_attention
from dist_attn.ops.softmax_attention.naive import softmax_attention_naive

__all__ = ["softmax_attention", "softmax_attention_naive"]

"""Text from a model: drawing tokens, and decoding step by step from the recurrent state."""

from dist_attn.generation.decode import generate
from dist_attn.generation.logprobs import token_logprobs
from dist_attn.generation.sampling import generator_for, sample

__all__ = ["generate", "generator_for", "sample", "token_logprobs"]

"""Text from a model: draws, beam search, and decoding step by step from the recurrent state."""

from dist_attn.generation.beam_search import BeamSpec, Hypothesis, beam_search, length_penalty
from dist_attn.generation.decode import generate
from dist_attn.generation.logprobs import token_logprobs
from dist_attn.generation.sampling import generator_for, sample

__all__ = [
    "BeamSpec",
    "Hypothesis",
    "beam_search",
    "generate",
    "generator_for",
    "length_penalty",
    "sample",
    "token_logprobs",
]

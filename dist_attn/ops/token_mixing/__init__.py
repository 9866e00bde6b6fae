"""The token-mixing MLP of MLP-Mixer: the oracle by definition and the form by matrix products."""

from dist_attn.ops.token_mixing.dense import Activation, check_token_weights, mix_tokens
from dist_attn.ops.token_mixing.naive import mix_tokens_naive

__all__ = ["Activation", "check_token_weights", "mix_tokens", "mix_tokens_naive"]

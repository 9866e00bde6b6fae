"""The token-mixing MLP of MLP-Mixer: the oracle by definition and the form by matrix products."""

from dist_attn.ops.token_mixing.dense import Activation, check_token_mlp, mix_tokens, sums_over_tokens, tokens_of_sums
from dist_attn.ops.token_mixing.naive import mix_tokens_naive

__all__ = ["Activation", "check_token_mlp", "mix_tokens", "mix_tokens_naive", "sums_over_tokens", "tokens_of_sums"]

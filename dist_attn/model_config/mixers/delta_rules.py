"""Mixers whose tokens take from the state as they write: gated DeltaNet, Kimi delta attention, RWKV-7.

Letters: D model size, H heads, G heads of keys, K numbers of a head's key, V values per head.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from dist_attn.model_config.figures import Weights, linear
from dist_attn.model_config.mixer import register_mixer
from dist_attn.model_config.mixers.recurrent import RecurrentConfig


class _DeltaConfig(RecurrentConfig):
    """The configuration of unit keys through a short convolution, and of a share of each that is written over."""

    short_convolution: int = Field(default=4, ge=1, le=64)
    # Tokens write over up to twice a value, so that a state may turn its sign along a key.
    allow_negative: bool = False

    @property
    def erasure(self) -> Literal["delta"]:
        """The kind of erasure: what a token's key reads."""
        return "delta"

    @property
    def taps(self) -> int:
        """The taps of the short convolution."""
        return self.short_convolution


class GatedDeltaConfig(_DeltaConfig):
    """Gated DeltaNet, as in Qwen3-Next: one decay for each head; heads of values may share those of keys."""

    kind: Literal["gated_delta"]
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    key_heads: int | None = Field(default=None, ge=1)  # None: as many as heads of values

    @model_validator(mode="after")
    def _key_heads_divide(self) -> Self:
        if self.num_heads % self.num_key_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of key_heads {self.num_key_heads}")
        return self

    @property
    def num_key_heads(self) -> int:
        """The number G of heads of keys."""
        return self.num_heads if self.key_heads is None else self.key_heads

    @property
    def gate_matrices(self) -> int:
        """The numbers of two gates for each head: of what is written over, and of its step."""
        return 2 * self.num_heads * self.hidden_size

    @property
    def vectors(self) -> int:
        """The numbers of taps; of biases of steps, and of rates; of the norm, which all heads share."""
        return self.short_convolution * self.convolved_size + 2 * self.num_heads + self.value_size

    @property
    def qkv_size(self) -> int:
        """The numbers of a token's queries, keys and values; heads of values may share one of keys and queries."""
        return 2 * self.num_key_heads * self.key_size + self.values_size


class KimiDeltaConfig(_DeltaConfig):
    """Kimi delta attention: a decay for each number of a key, and an output gate, both of low rank."""

    kind: Literal["kda"]
    gate_rank: int | None = Field(default=None, ge=1)  # None: key_size

    @property
    def rank(self) -> int:
        """The rank of both gates."""
        return self.key_size if self.gate_rank is None else self.gate_rank

    @property
    def layers(self) -> Weights:
        """The weights of q, k and v in one, and of the output."""
        return linear(self.hidden_size, self.qkv_size) + linear(self.values_size, self.hidden_size)

    @property
    def gate_matrices(self) -> int:
        """The numbers of the gates of what is written over, of decays, and of outputs."""
        down_and_up = 2 * self.hidden_size + self.keys_size + self.values_size
        return self.num_heads * self.hidden_size + self.rank * down_and_up

    @property
    def vectors(self) -> int:
        """The numbers of taps; of biases of steps, and of rates; of the norm, which all heads share."""
        return self.short_convolution * self.convolved_size + self.keys_size + self.num_heads + self.value_size

    @property
    def decays(self) -> int:
        """The decays of a head: one for each number of a key."""
        return self.key_size


class Rwkv7Config(RecurrentConfig):
    """The time mixing of RWKV-7: tokens mixed with the ones before, and a state that gives up more than it takes in."""

    kind: Literal["rwkv7"]
    norm_eps: float = Field(default=64e-5, gt=0, allow_inf_nan=False)
    # Ranks of the gates of decays, of how much is replaced, and of outputs.
    decay_rank: int = Field(default=64, ge=1)
    rate_rank: int = Field(default=64, ge=1)
    gate_rank: int = Field(default=128, ge=1)

    @property
    def layers(self) -> Weights:
        """The weights of receptance, key, value and output."""
        size, keys, values = self.hidden_size, self.keys_size, self.values_size
        return linear(size, keys) * 2 + linear(size, values) + linear(values, size)

    @property
    def gate_matrices(self) -> int:
        """The numbers of the gates' matrices: down to their ranks, and up to all keys or values."""
        to_keys = (self.decay_rank + self.rate_rank) * (self.hidden_size + self.keys_size)
        return to_keys + self.gate_rank * (self.hidden_size + self.values_size)

    @property
    def vectors(self) -> int:
        """The numbers of six shares of the token before; two biases and three factors for each key; norm and bias."""
        return 6 * self.hidden_size + 5 * self.keys_size + 2 * self.values_size

    @property
    def taps(self) -> int:
        """The taps of the mixing with the token before."""
        return 2

    @property
    def convolved_size(self) -> int:
        """The numbers of a token as it is."""
        return self.hidden_size

    @property
    def mixed_numbers(self) -> int:
        """The numbers of tokens mixed in six ways."""
        return 12 * self.hidden_size

    @property
    def decays(self) -> int:
        """The decays of a head: one for each number of a key."""
        return self.key_size

    @property
    def erasure(self) -> Literal["any"]:
        """The kind of erasure: what a token's key reads is taken along another vector."""
        return "any"


register_mixer(GatedDeltaConfig, "dist_attn.mixers.delta_rules:GatedDeltaNet")
register_mixer(KimiDeltaConfig, "dist_attn.mixers.delta_rules:KimiDeltaAttention")
register_mixer(Rwkv7Config, "dist_attn.mixers.delta_rules:Rwkv7")

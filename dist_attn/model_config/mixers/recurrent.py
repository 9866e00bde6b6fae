"""Mixers over an affine recurrence of each head's state: by a decay alone (GLA, lightning attention, Mamba-2).

Letters: B batch, D model size, H heads, K numbers of a head's key, V values per head, C tokens of a chunk.
"""

from abc import abstractmethod
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dist_attn.model_config.figures import (
    FLOAT_BYTES,
    ScanMessage,
    TokenFlops,
    Traffic,
    Weights,
    linear,
    takes_turns,
)
from dist_attn.model_config.mixer import MixerConfig, register_mixer

CHUNK_TOKENS, BLOCK_CHUNKS = 64, 8  # of the form in chunks, and how many it works on at once


def _even_share(known: dict[str, Any]) -> int:
    return int(known["hidden_size"] // known["num_heads"])


class RecurrentConfig(MixerConfig):
    """A mixer with a state of K V numbers per head, whatever the length, and the last tokens for a convolution."""

    num_heads: int = Field(ge=1)
    # The numbers of a head's queries and keys, and of its values: hidden_size / num_heads unless they are given.
    key_size: int = Field(default_factory=_even_share, validate_default=True, ge=1)
    value_size: int = Field(default_factory=_even_share, validate_default=True, ge=1)
    norm_eps: float = Field(default=1e-5, gt=0, allow_inf_nan=False)  # of the norm of outputs

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        shares = {name for name, field in type(self).model_fields.items() if field.default_factory is not None}
        if shares - self.model_fields_set and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        return self

    @property
    def keys_size(self) -> int:
        """The numbers H K in the keys of a token, of all heads."""
        return self.num_heads * self.key_size

    @property
    def values_size(self) -> int:
        """The numbers H V in the values of a token, of all heads."""
        return self.num_heads * self.value_size

    @property
    def qkv_size(self) -> int:
        """The numbers of a token's queries, keys and values, as they are projected."""
        return 2 * self.keys_size + self.values_size

    @property
    def layers(self) -> Weights:
        """The weights of linear layers but for gates: q, k, v and the output gate in one, and the output."""
        size, values = self.hidden_size, self.values_size
        return linear(size, self.qkv_size + values) + linear(values, size)

    @property
    @abstractmethod
    def gate_matrices(self) -> int:
        """The numbers of the matrices of gates, which stay in float32."""

    @property
    @abstractmethod
    def vectors(self) -> int:
        """The numbers of all other parameters: biases, taps, rates, norms."""

    @property
    def taps(self) -> int:
        """The taps of the short convolution."""
        return 0

    @property
    def convolved_size(self) -> int:
        """The numbers of a token that go through the short convolution, if there is one."""
        return self.qkv_size if self.taps else 0

    @property
    def decays(self) -> int:
        """The decays of each head: one, or one for each number of its key."""
        return 1

    @property
    def erasure(self) -> Literal["none", "delta", "any"]:
        """The kind of erasure: tokens take nothing from the state, what their key reads, or anything of rank one."""
        return "none"

    @property
    def mixed_numbers(self) -> int:
        """The numbers of a token that are made before projections."""
        return 0

    def weights(self) -> Weights:
        """The weights of linear layers, gates and the rest."""
        return self.layers + Weights(others=self.gate_matrices + self.vectors)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes of the states of all heads, and of edge tokens."""
        return FLOAT_BYTES * batch * self.keys_size * self.value_size + self.traffic(batch).edge_bytes

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of states, with what a rank's tokens do to them where ranks take no turns, and of edge tokens."""
        size, kept = self.key_size, max(0, self.taps - 1)
        weights = self.decays if self.erasure == "none" else size**2
        return Traffic(
            scanned=ScanMessage(
                batch * self.num_heads, size * self.value_size, rows=size, weights=weights, heads=self.num_heads
            ),
            edge_bytes=FLOAT_BYTES * batch * kept * self.convolved_size,
        )

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the form in chunks, and where ranks take no turns of a walk before it over the same tokens.

        Scores are squares of which all is computed; pairs of queries and keys come in the half that is needed.
        """
        scores, state = self._walk_flops(self.value_size, reads=True)
        scanned = self.traffic().scanned
        if scanned is not None and not takes_turns(ranks, scanned.heads, erases=scanned.erases):
            size = 0 if self.erasure == "none" else self.key_size
            both = self._walk_flops(self.value_size + size, reads=False)
            scores, state = scores + both[0], state + both[1]
        return TokenFlops(
            projections=self._projection_flops, scores=self.num_heads * scores, state=self.num_heads * state
        )

    def decode_flops(self, position: int) -> TokenFlops:
        """The operations of a write and a read of the state; an erasure takes one read more, and if any, one write."""
        passes = {"none": 2, "delta": 3, "any": 4}[self.erasure]
        return TokenFlops(projections=self._projection_flops, state=2.0 * passes * self.keys_size * self.value_size)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of tokens, queries, keys, values and gates; beside them a block's pairs, or later the norm."""
        pairs = {"none": 1, "delta": 2, "any": 3}[self.erasure]
        size, values = self.key_size, self.value_size
        block = self.num_heads * (3 * pairs * (CHUNK_TOKENS + size) + 2 * size * values // CHUNK_TOKENS)
        around = 2 * self.hidden_size + 3 * self.convolved_size + 4 * (self.keys_size + self.values_size)
        around += self.mixed_numbers
        during = tokens * around + min(tokens, BLOCK_CHUNKS * CHUNK_TOKENS) * block
        return FLOAT_BYTES * batch * max(during, tokens * (around + 5 * self.values_size))

    def _walk_flops(self, values: int, *, reads: bool) -> tuple[float, float]:
        """The operations of a token and head, in squares and in all else; `reads`: with queries, `values` per head."""
        c, k, v = CHUNK_TOKENS, self.key_size, values
        pairs, written = (c - 1) * k, 2 * k * v
        squares, read = (c * v, written) if reads else (0, 0)
        if self.erasure == "none":
            return float(squares), float(written + read + pairs * reads)
        # The chunk's map of the state: the values of all tokens at once, what becomes of it, and applying it.
        changed = read + 2 * k**2 * (1 + v / c)
        squares += c * (k + v)
        if self.erasure == "delta":
            return float(squares), float(written + read + changed + pairs * (1 + reads))
        return squares + c * v * (1.0 + reads), float(2 * written + read + changed + 2 * pairs * (1 + reads))

    @property
    def _projection_flops(self) -> float:
        return 2.0 * (self.layers.matrices + self.gate_matrices)


class GlaConfig(RecurrentConfig):
    """Gated linear attention: a decay for each number of a key, by a gate of low rank.

    Its authors take keys of half a head's share, `key_size = hidden_size / num_heads / 2`.
    """

    kind: Literal["gla"]
    gate_rank: int = Field(default=16, ge=1)
    gate_divisor: float = Field(default=16.0, gt=0, allow_inf_nan=False)  # of the logarithms of gates

    @property
    def gate_matrices(self) -> int:
        """The numbers of the gate's matrices: down to the rank, and up to all keys."""
        return self.gate_rank * (self.hidden_size + self.keys_size)

    @property
    def vectors(self) -> int:
        """The numbers of a bias for each decay; of the norm, which all heads share."""
        return self.keys_size + self.value_size

    @property
    def decays(self) -> int:
        """The decays of a head: one for each number of a key."""
        return self.key_size


class LightningConfig(RecurrentConfig):
    """Lightning attention: one constant decay for each head, exp of minus a slope."""

    kind: Literal["lightning"]
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    # 2^(-8 h / H) of head h = 1 to H, or as in RetNet -log(1 - 2^(-4 - h)).
    slopes: Literal["lightning", "retention"] = "lightning"
    slope_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # smaller in later layers, of their authors
    norm: Literal["whole", "heads"] = "whole"  # of all outputs of a token at once, or of each head's

    @property
    def gate_matrices(self) -> int:
        """The numbers of gates: none, as decays are constants."""
        return 0

    @property
    def vectors(self) -> int:
        """The numbers of the norm."""
        return self.values_size


def _wide_share(known: dict[str, Any]) -> int:
    return 2 * _even_share(known)


class Mamba2Config(RecurrentConfig):
    """Mamba-2: a step for each head and token says what it writes and forgets; keys are shared by groups of heads."""

    kind: Literal["mamba2"]
    key_size: int = Field(default=64, ge=1)  # N, numbers of the state for each value
    value_size: int = Field(default_factory=_wide_share, validate_default=True, ge=1)
    groups: int = Field(default=1, ge=1)  # of heads that share keys and queries (B and C), and whose norm is one
    short_convolution: int = Field(default=4, ge=1, le=64)
    convolution_bias: bool = True

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        if self.num_heads % self.groups:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of groups {self.groups}")
        return self

    @property
    def gate_matrices(self) -> int:
        """The numbers of the gate of a step for each head."""
        return self.num_heads * self.hidden_size

    @property
    def vectors(self) -> int:
        """The numbers of taps and their bias; of biases of steps, rates and skips of heads; of the norm."""
        taps = self.short_convolution + self.convolution_bias
        return taps * self.convolved_size + 3 * self.num_heads + self.values_size

    @property
    def taps(self) -> int:
        """The taps of the short convolution."""
        return self.short_convolution

    @property
    def qkv_size(self) -> int:
        """The numbers of a token's C, B and x."""
        return self.values_size + 2 * self.groups * self.key_size


register_mixer(GlaConfig, "dist_attn.mixers.decaying:GatedLinearAttention")
register_mixer(LightningConfig, "dist_attn.mixers.decaying:LightningAttention")
register_mixer(Mamba2Config, "dist_attn.mixers.decaying:Mamba2")

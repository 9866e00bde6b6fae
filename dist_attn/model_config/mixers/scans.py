"""Mixers that forget as their tokens say: Mamba's selective scan, Griffin's RG-LRU, and xLSTM's matrix memory.

Letters: B batch, L tokens, D model size, E inner size, N numbers of a channel's state, R rank of steps, K taps.
"""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.figures import FLOAT_BYTES, ScanMessage, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer
from dist_attn.model_config.mixers.kernels import KernelCosts

CHUNK_TOKENS = 16
BLOCK_TOKENS = 1024
BLOCK_BYTES = 2**21  # of the states of a block's tokens


class MambaConfig(MixerConfig):
    """Mamba: a state space for every channel, whose steps, inputs and read-outs the tokens choose."""

    kind: Literal["mamba"]
    expand: int = Field(default=2, ge=1)  # inner channels for each of the model's
    state_size: int = Field(default=16, ge=1)  # of every inner channel
    dt_rank: int | None = Field(default=None, ge=1)  # of the map to the steps; None: hidden_size / 16, rounded up
    # Taps of the causal depthwise convolution of the inner channels.
    short_convolution: int = Field(default=4, ge=1, le=64)
    convolution_bias: bool = True
    projection_bias: bool = False  # of the way in and out
    # Steps of the channels begin between these, evenly on a logarithmic scale.
    dt_min: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    dt_max: float = Field(default=1e-1, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> "MambaConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is above dt_max {self.dt_max}")
        return self

    @property
    def inner_size(self) -> int:
        """The inner size E."""
        return self.expand * self.hidden_size

    @property
    def step_rank(self) -> int:
        """The rank R of the steps."""
        return -(-self.hidden_size // 16) if self.dt_rank is None else self.dt_rank

    def weights(self) -> Weights:
        """The weights in and out, and to R + 2 N numbers; taps, steps with their bias, A and D of every channel."""
        size, inner, rank = self.hidden_size, self.inner_size, self.step_rank
        own = self.short_convolution + self.convolution_bias + rank + 1 + self.state_size + 1
        return (
            linear(size, 2 * inner, bias=self.projection_bias)
            + linear(inner, rank + 2 * self.state_size)
            + linear(inner, size, bias=self.projection_bias)
            + Weights(others=inner * own)
        )

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes 4 B E N, and those of K - 1 edge tokens."""
        return FLOAT_BYTES * batch * self.inner_size * self.state_size + self.traffic(batch).edge_bytes

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of the states and as many log decays, and of K - 1 edge tokens."""
        n = self.state_size
        edge = FLOAT_BYTES * batch * (self.short_convolution - 1) * self.inner_size
        return Traffic(scanned=ScanMessage(batch * self.inner_size, n, rows=n, weights=n), edge_bytes=edge)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the state's read-out; of several ranks each walks its tokens twice, for what they leave."""
        projections = 2.0 * self.weights().matrices + 2.0 * self.inner_size * self.step_rank
        walks = 1 if ranks == 1 else 2
        return TokenFlops(projections=projections, state=walks * 2.0 * self.inner_size * self.state_size)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of about seven tensors of [B, L, E], and of seven of the states of a block."""
        each = batch * tokens * self.inner_size
        block = _block_tokens(batch * self.inner_size * self.state_size, tokens)
        states = batch * self.inner_size * self.state_size * block
        return FLOAT_BYTES * 7 * (each + states)


class RgLruConfig(MixerConfig):
    """Griffin's recurrent block: a gated number for every channel, behind a convolution and beside a gate."""

    kind: Literal["rg_lru"]
    num_heads: int = Field(ge=1)  # blocks of the maps to the gates
    width: int | None = Field(default=None, ge=1)  # E; None: hidden_size
    # Taps of the causal depthwise convolution.
    short_convolution: int = Field(default=4, ge=1, le=64)

    @model_validator(mode="after")
    def _heads_divide(self) -> "RgLruConfig":
        if self.inner_size % self.num_heads:
            raise ValueError(f"width {self.inner_size} must be a multiple of num_heads {self.num_heads}")
        return self

    @property
    def inner_size(self) -> int:
        """The inner size E."""
        return self.hidden_size if self.width is None else self.width

    def weights(self) -> Weights:
        """The weights of three linear layers; of taps, two gates with their biases, and a decay of every channel."""
        size, inner = self.hidden_size, self.inner_size
        own = inner * (self.short_convolution + 1 + 2 * (inner // self.num_heads + 1) + 1)
        return linear(size, 2 * inner, bias=True) + linear(inner, size, bias=True) + Weights(others=own)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes 4 B E, those of K - 1 edge tokens, and of whether there were any."""
        return FLOAT_BYTES * batch * self.inner_size + self.traffic(batch).edge_bytes + batch

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of the states and as many log decays, and of K - 1 edge tokens."""
        edge = FLOAT_BYTES * batch * (self.short_convolution - 1) * self.inner_size
        return Traffic(scanned=ScanMessage(batch * self.inner_size, 1), edge_bytes=edge)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the linear layers and the gates; work along the sequence is element by element."""
        gates = 4.0 * self.inner_size * (self.inner_size // self.num_heads)
        return TokenFlops(projections=2.0 * self.weights().matrices + gates)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of about fourteen tensors of [B, L, E], most of them of the gates."""
        return FLOAT_BYTES * 14 * batch * tokens * self.inner_size


class MLstmConfig(KernelCosts):
    """xLSTM's matrix memory: linear attention with gates, exponential weights of keys, and a normaliser."""

    kind: Literal["mlstm"]
    key_size: int | None = Field(
        default=None, ge=1
    )  # of a head's queries and keys; None: half of hidden_size / num_heads
    projection_bias: bool = False  # of q, k, v, the output gate, the norm and the output
    gate_soft_cap: float | None = Field(default=15.0, gt=0, allow_inf_nan=False)  # of the gates' logits; None: no cap

    @property
    def num_features(self) -> int:
        """The numbers in a head's queries and keys."""
        return max(1, self.head_size // 2) if self.key_size is None else self.key_size

    @property
    def keys_size(self) -> int:
        """The numbers in the keys of a token, of all heads."""
        return self.num_heads * self.num_features

    @property
    def outputs_size(self) -> int:
        """The numbers in the values of a token, of all heads."""
        return self.num_heads * (self.value_size - 1)

    @property
    def value_size(self) -> int:
        """The numbers in a head's values, and one more, which sums up the keys."""
        return 1 + (self.head_size if self.value_rank is None else self.value_rank)

    @property
    def gates(self) -> int:
        """The number of gates: one that forgets and one that weighs, for each head."""
        return 2 * self.num_heads

    @property
    def weighs_keys(self) -> bool:
        """Return True: a key's weight is exp of the input gate."""
        return True

    def weights(self) -> Weights:
        """The weights of q, k, v, the output gate and the output; a row and a bias for each gate, and the norm."""
        size, values, bias = self.hidden_size, self.outputs_size, self.projection_bias
        own = self.gates * (size + 1) + values * (1 + bias)
        layers = linear(size, 2 * self.keys_size + 2 * values, bias=bias) + linear(values, size, bias=bias)
        return layers + Weights(others=own)


def _block_tokens(state_numbers: int, tokens: int) -> int:
    most = BLOCK_BYTES // (FLOAT_BYTES * state_numbers) // CHUNK_TOKENS * CHUNK_TOKENS
    return min(max(CHUNK_TOKENS, min(most, BLOCK_TOKENS)), tokens)


register_mixer(MambaConfig, "dist_attn.mixers.scans:Mamba")
register_mixer(RgLruConfig, "dist_attn.mixers.scans:RecurrentBlock")
register_mixer(MLstmConfig, "dist_attn.mixers.mlstm:MatrixMemory")

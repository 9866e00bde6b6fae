"""State spaces: diagonal (S4D), diagonal plus low rank (S4), full (LSSL), and the memory of the whole past (HiPPO).

Letters: B batch, D model size, N numbers of a channel's state, M outputs of a channel, L tokens, T tokens of a chunk.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from dist_attn.model_config.figures import FLOAT_BYTES, ScanMessage, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer
from dist_attn_papers.mixers.convolution_configs import channels_and_back, long_convolution_flops

CHUNK_TOKENS = 64
STATE_BLOCK_CHUNKS = 8  # that the chunked recurrence of S4D works on at once
LEGS_CHUNK_TOKENS = 32
BLOCK_CHUNKS, BLOCK_WEIGHTS, BLOCK_COEFFICIENTS = 16, 1 << 19, 1 << 22  # of the chunked form of LegS
DOUBLE_BYTES = 8


class HippoConfig(MixerConfig):
    """The memory of the whole past by LegS, of `state_size` coefficients (in float64) for every channel."""

    kind: Literal["hippo"]
    state_size: int = Field(default=32, ge=1, le=512)

    @property
    def packs(self) -> bool:
        """Return False: it takes one unbroken sequence."""
        return False

    def weights(self) -> Weights:
        """The weights of a read-out of N numbers and a skip per channel, and of the gated output."""
        return _gated_output(self.hidden_size) + Weights(others=self.hidden_size * (self.state_size + 1))

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes 8 B D N, and those of the number of tokens seen."""
        return DOUBLE_BYTES * batch * (self.hidden_size * self.state_size + 1)

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of 8 B (D + 1) N bytes: a silent channel tells what the rank's tokens make others forget."""
        n = self.state_size
        return Traffic(scanned=ScanMessage(batch, n * self.hidden_size, DOUBLE_BYTES, rows=n, weights=n))

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the chunked form; of several ranks each walks its tokens twice, for the state it sends.

        The matrices of a chunk are the same for all channels and sequences that began together, and are counted once.
        """
        walks, n, chunk = 1 if ranks == 1 else 2, self.state_size, LEGS_CHUNK_TOKENS
        making = 2.0 * n**2 * (chunk - 1) * (n + chunk / 2) / chunk
        passing = 2.0 * self.hidden_size * n * (n + chunk) / chunk
        reading = 2.0 * self.hidden_size * n * (n + chunk)
        return TokenFlops(projections=4.0 * self.hidden_size**2, state=walks * (making + passing) + reading)

    def decode_flops(self, position: int) -> TokenFlops:
        """The operations of a product with a full matrix and one read-out: equal at every position."""
        n = self.state_size
        return TokenFlops(projections=4.0 * self.hidden_size**2, state=2.0 * self.hidden_size * n * (n + 1))

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of about six tensors of [B, L, D]; or of four, some chunks' matrices, and one's coefficients."""
        size, n, chunk = self.hidden_size, self.state_size, LEGS_CHUNK_TOKENS
        weights, read = chunk * n * (n + chunk), batch * size * n * chunk
        chunks = min(BLOCK_CHUNKS, BLOCK_WEIGHTS // weights, BLOCK_COEFFICIENTS // read, tokens // chunk)
        block = max(1, chunks) * (2 * DOUBLE_BYTES + FLOAT_BYTES) * weights + 2 * FLOAT_BYTES * read
        each = FLOAT_BYTES * batch * tokens * size
        return max(6 * each, 4 * each + block)


class _StateSpaceConfig(MixerConfig):
    state_size: int = Field(default=64, ge=2, multiple_of=2)  # real numbers; half as many conjugate pairs
    # Steps of the channels are drawn between these, evenly on a logarithmic scale.
    dt_min: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    dt_max: float = Field(default=1e-1, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> Self:
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is above dt_max {self.dt_max}")
        return self

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes 4 B D N."""
        return FLOAT_BYTES * batch * self.hidden_size * self.state_size

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of 4 B D N bytes, and of the number of tokens, as two numbers."""
        rows = self.hidden_size * self.state_size
        return Traffic(scanned=ScanMessage(1, batch * rows, rows=rows, weights=2))


class LsslConfig(_StateSpaceConfig):
    """A state space with one full matrix for all channels, and some outputs for each."""

    kind: Literal["lssl"]
    outputs: int = Field(default=1, ge=1)  # of every channel
    # The alpha of the generalised bilinear transform: 0 Euler, 1/2 trapezoidal, 1 backward.
    alpha: float = Field(default=0.5, ge=0, le=1)
    transition: Literal["fixed", "learned"] = "fixed"

    @model_validator(mode="after")
    def _longest_step_is_stable(self) -> Self:
        # LegS's eigenvalues are -1 to -N: a step takes the last to (1 - (1 - alpha) N dt) / (1 + alpha N dt), in size
        # above 1 from here on.
        if self.alpha < 0.5 and self.dt_max > (bound := 2 / ((1 - 2 * self.alpha) * self.state_size)):
            raise ValueError(
                f"dt_max {self.dt_max} was given with alpha {self.alpha} and state_size {self.state_size}: states grow "
                f"without end for steps above {bound:.3g}; give a smaller dt_max, or alpha of 0.5 or more"
            )
        return self

    @property
    def packs(self) -> bool:
        """Return False: it takes one unbroken sequence."""
        return False

    def weights(self) -> Weights:
        """The weights of a step, M N + M numbers per channel, and the output; of A and B, learned or fixed."""
        size, each, n = self.hidden_size, self.outputs, self.state_size
        matrix = n**2 + n
        learned = self.transition == "learned"
        own = Weights(others=size + size * each * (n + 1) + matrix * learned, buffers=matrix * (not learned))
        return linear(size * each, size, bias=True) + own

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the chunked form of a full matrix."""
        projections = 2.0 * self.weights().matrices
        return _dense_flops(self.hidden_size, self.state_size, self.outputs, ranks, projections)

    def decode_flops(self, position: int) -> TokenFlops:
        """The operations of one product with the matrix and one read-out."""
        state = 2.0 * self.hidden_size * self.state_size * (self.state_size + self.outputs)
        return TokenFlops(projections=2.0 * self.weights().matrices, state=state)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of a full matrix."""
        return _dense_activations(self.hidden_size, self.state_size, self.outputs, tokens, batch)


class _EitherFormConfig(_StateSpaceConfig):
    # The state goes along the sequence, or the whole response is taken as one convolution, which can look both ways.
    form: Literal["scan", "convolution"] = "scan"
    bidirectional: bool = False

    forms = {"": {}, "as a convolution": {"form": "convolution"}}  # noqa: RUF012

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.bidirectional and self.form != "convolution":
            raise ValueError("a bidirectional state space was asked for as a scan; give form = convolution")
        return self

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return not self.bidirectional

    @property
    def streams(self) -> bool:
        """Return whether there is a state to go on from."""
        return self.form == "scan"

    @property
    def _systems(self) -> int:
        """The number of state spaces: one, and one more for the tokens after each."""
        return 2 if self.bidirectional else 1

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes of the state; none as a convolution."""
        return super().state_bytes(position, batch) if self.streams else 0

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of the state, or of all tokens of some channels and back."""
        return super().traffic(batch) if self.streams else channels_and_back(self.hidden_size, batch)


class S4DConfig(_EitherFormConfig):
    """A diagonal state space for every channel."""

    kind: Literal["s4d"]
    spectrum: Literal["lin", "inv", "real", "legs"] = "lin"
    rule: Literal["zoh", "bilinear"] = "zoh"

    def weights(self) -> Weights:
        """The weights: per channel a skip, a step and four numbers per pair, and the output; an input for each pair."""
        size, pairs = self.hidden_size, self.state_size // 2
        own = Weights(others=size + self._systems * size * (1 + 4 * pairs), buffers=self._systems * pairs)
        return _gated_output(size) + own

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the chunked form, where each of several ranks reads inputs twice; or of the convolution."""
        size, pairs, projections = self.hidden_size, self.state_size // 2, 2.0 * self.weights().matrices
        if not self.streams:
            kernel = self._systems * size * 8.0 * pairs
            return long_convolution_flops(size, tokens, kernel=kernel, projections=projections)
        passes = 2 if ranks == 1 else 3
        return TokenFlops(projections=projections, scores=1.0 * size * CHUNK_TOKENS, state=passes * 4.0 * size * pairs)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of six tensors of [B, L, D]; or of four, a chunk's powers of every pair and a block's states."""
        numbers = self.hidden_size * self.state_size
        chunks = min(STATE_BLOCK_CHUNKS, -(-tokens // CHUNK_TOKENS))
        block = numbers * (7 * CHUNK_TOKENS + 3 * batch * chunks) + self.hidden_size * CHUNK_TOKENS**2
        each = batch * tokens * self.hidden_size
        return FLOAT_BYTES * max(6 * each + numbers, 4 * each + block)


class S4Config(_EitherFormConfig):
    """A diagonal plus low-rank state space for every channel."""

    kind: Literal["s4"]

    @property
    def packs(self) -> bool:
        """Return whether it takes packed documents: as a convolution alone."""
        return self.form == "convolution"

    def weights(self) -> Weights:
        """The weights of a skip per channel, a step and eight numbers per pair of each, and the gated output."""
        size = self.hidden_size
        return _gated_output(size) + Weights(others=size + self._systems * size * (1 + 4 * self.state_size))

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the chunked form of a full matrix, or of the convolution."""
        size, projections = self.hidden_size, 2.0 * self.weights().matrices
        if not self.streams:
            kernel = self._systems * size * 16.0 * self.state_size
            return long_convolution_flops(size, tokens, kernel=kernel, projections=projections)
        return _dense_flops(size, self.state_size, 1, ranks, projections)

    def decode_flops(self, position: int) -> TokenFlops:
        """The operations of one product with the matrix and one read-out."""
        state = 2.0 * self.hidden_size * self.state_size * (self.state_size + 1)
        return TokenFlops(projections=2.0 * self.weights().matrices, state=state)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of a full matrix."""
        return _dense_activations(self.hidden_size, self.state_size, 1, tokens, batch)


def _gated_output(size: int) -> Weights:
    return linear(size, 2 * size, bias=True)


def _dense_flops(size: int, state_size: int, outputs: int, ranks: int, projections: float) -> TokenFlops:
    """The operations of the chunked form; of several ranks each reads its inputs twice, for the state it sends.

    Powers of the matrices, N^3 log T per channel and call, are not counted as operations of a token.
    """
    walks = 1 if ranks == 1 else 2
    update = state_size + state_size**2 / CHUNK_TOKENS
    return TokenFlops(
        projections=projections,
        scores=1.0 * size * outputs * CHUNK_TOKENS,
        state=2.0 * size * (walks * update + state_size * outputs),
    )


def _dense_activations(size: int, state_size: int, outputs: int, tokens: int, batch: int) -> int:
    """The bytes of five tensors of [B, L, D], two of M outputs; or of all channels' powers and a Toeplitz matrix."""
    powers = size * (4 * state_size**2 + CHUNK_TOKENS * state_size * (2 + 2 * outputs))
    toeplitz = size * outputs * CHUNK_TOKENS**2
    each = batch * tokens * size
    return FLOAT_BYTES * max((5 + 2 * outputs) * each, (3 + outputs) * each + powers + 2 * toeplitz)


register_mixer(HippoConfig, "dist_attn_papers.mixers.state_space:LegsMemory")
register_mixer(LsslConfig, "dist_attn_papers.mixers.state_space:LinearStateSpace")
register_mixer(S4DConfig, "dist_attn_papers.mixers.s4:s4d")
register_mixer(S4Config, "dist_attn_papers.mixers.s4:s4")

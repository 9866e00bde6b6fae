"""What a whole model costs, from the few numbers of its folder's config.json; no model is built."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dist_attn.costs.build import Count, MixerNumbers, mixer_costs
from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.linear_weights import LinearWeights
from dist_attn.costs.mixers import FLOAT_BYTES, POSITION_BYTES, MixerCosts
from dist_attn.errors import ConfigError
from dist_attn.wire.choices import WeightPrecision

__all__ = ["LanguageModelCosts", "model_kind", "read_model_costs"]


_HALF_BYTES = 2


@dataclass(frozen=True)
class LanguageModelCosts:
    """A language model: embedding, pre-norm blocks of mixer and MLP, final norm, read-out tied or of its own.

    `mixers` are those of the layers, in order; `weights` is how those of linear layers and tables lie in memory.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    mixers: tuple[MixerCosts, ...]
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["plain", "gated"] = "plain"
    mlp_bias: bool = True
    learned_positions: int = 0
    concatenated_positions: bool = False
    readout: Literal["tied", "own"] = "tied"
    weights: WeightPrecision = "float32"

    @property
    def num_layers(self) -> int:
        """How many blocks there are."""
        return len(self.mixers)

    @cached_property
    def kinds(self) -> dict[MixerCosts, int]:
        """The different mixers, and how many layers have each."""
        return dict(Counter(self.mixers))

    def over_layers(self, count: Callable[[MixerCosts], int]) -> int:
        """The sum of something that is counted of a mixer, over all layers."""
        return sum(layers * count(mixer) for mixer, layers in self.kinds.items())

    @property
    def carry_bytes(self) -> int:
        """The largest state message that a rank contributes to a block in a layer."""
        return max(mixer.carry_bytes() for mixer in self.kinds)

    @property
    def parameters(self) -> int:
        """Learned numbers of the whole model."""
        size = self.hidden_size
        norm = 2 * size if self.norm == "layer" else size
        bias = self._mlp_inner + size if self.mlp_bias else 0
        per_layer = 2 * norm + self._mlp_weights + bias
        mixers = self.over_layers(lambda mixer: mixer.parameters)
        tables = self.learned_positions + self.vocab_size * (2 if self.readout == "own" else 1)
        position_map = 2 * size * size + size if self.concatenated_positions else 0
        return tables * size + position_map + self.num_layers * per_layer + mixers + norm

    @property
    def weights_bytes(self) -> int:
        """Parameters and buffers as they lie in memory."""
        return self.read_bytes - self._linear.saved_bytes(self.weights)

    @property
    def read_bytes(self) -> int:
        """Parameters and buffers in float32, as they are read from the folder."""
        return FLOAT_BYTES * (self.parameters + self.over_layers(lambda mixer: mixer.buffers))

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """What `batch` sessions keep after `position` tokens each."""
        return self.over_layers(lambda mixer: mixer.state_bytes(position, batch))

    def state_bytes_of_rank(self, position: int, ranks: int) -> int:
        """What one of `ranks` ranks keeps of a session after `position` tokens."""
        return self.over_layers(lambda mixer: mixer.state_bytes(mixer.kept_tokens(position, ranks)))

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Per token, on average over a sequence of `tokens`; hidden states only, no read-out."""
        return self._all_layers(lambda mixer: mixer.prefill_flops(tokens, ranks))

    def decode_flops(self, position: int = 0) -> TokenFlops:
        """Of the token at `position`, with the read-out."""
        parts = self._all_layers(lambda mixer: mixer.decode_flops(position))
        return replace(parts, readout=2.0 * self.hidden_size * self.vocab_size)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """Peak of all temporary tensors in a block of `tokens` per sequence, without gradients.

        The larger of the MLP's (four tensors of the model's width, two of its own, three if gated) and the mixer's;
        plus the tokens' positions, and the state after the block, which is made beside the one before it.

        A product with weights of fewer bits has its inputs and its result as bfloat16 beside those in float32, at most
        those of the MLP, and a copy of its weights: widened from int8 and then packed, which is 2 bytes twice, packed
        alone, or float32. Steps make a copy of the read-out so, at another time.
        """
        mlp = FLOAT_BYTES * batch * tokens * (4 * self.hidden_size + self.mlp_size + self._mlp_inner)
        layer = max(mlp, *(mixer.activation_bytes(tokens, batch) for mixer in self.kinds))
        if self.weights != "float32":
            layer += _HALF_BYTES * batch * tokens * (self.hidden_size + self._mlp_inner)
            largest = max(self.hidden_size * self._mlp_inner, *(mixer.linear.numbers for mixer in self.kinds))
            layer = max(layer + FLOAT_BYTES * largest, FLOAT_BYTES * self.hidden_size * self.vocab_size)
        return layer + 2 * POSITION_BYTES * batch * tokens + self.state_bytes(tokens, batch)

    def _all_layers(self, count: Callable[[MixerCosts], TokenFlops]) -> TokenFlops:
        parts = [(layers, count(mixer)) for mixer, layers in self.kinds.items()]
        return TokenFlops(
            projections=sum(layers * part.projections for layers, part in parts) + self._position_flops,
            features=sum(layers * part.features for layers, part in parts),
            scores=sum(layers * part.scores for layers, part in parts),
            state=sum(layers * part.state for layers, part in parts),
            mlp=2.0 * self.num_layers * self._mlp_weights,
        )

    @property
    def _linear(self) -> LinearWeights:
        """Mixers', the MLPs', the tables of tokens, and the map of concatenated positions."""
        size = self.hidden_size
        layer = LinearWeights(self._mlp_weights, self._mlp_inner + size)
        table = LinearWeights(self.vocab_size * size, self.vocab_size) * (2 if self.readout == "own" else 1)
        position_map = LinearWeights(2 * size * size, size) * int(self.concatenated_positions)
        mixers = sum((mixer.linear * layers for mixer, layers in self.kinds.items()), LinearWeights())
        return layer * self.num_layers + table + position_map + mixers

    @property
    def _position_flops(self) -> float:
        return 4.0 * self.hidden_size**2 if self.concatenated_positions else 0.0

    @property
    def _mlp_inner(self) -> int:
        return self.mlp_size * (2 if self.mlp == "gated" else 1)

    @property
    def _mlp_weights(self) -> int:
        return self.hidden_size * (self._mlp_inner + self.mlp_size)


class _NormConfig(msgspec.Struct, frozen=True):
    kind: Literal["layer", "rms"] = "layer"


class _MlpConfig(msgspec.Struct, frozen=True):
    kind: Literal["plain", "gated"] = "plain"
    bias: bool = True


class _BlockConfig(msgspec.Struct, frozen=True):
    norm: _NormConfig = _NormConfig()
    mlp: _MlpConfig = _MlpConfig()


class _LearnedPositions(msgspec.Struct, frozen=True):
    length: Count


class _Kind(msgspec.Struct, frozen=True):
    kind: str = ""


class _ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vocab_size: Count
    hidden_size: Count
    num_layers: Annotated[int, Meta(ge=1, le=10_000)]
    mlp_size: Count
    mixer: MixerNumbers
    positions: str | _LearnedPositions = "none"
    block: _BlockConfig = _BlockConfig()
    readout: Literal["tied", "own"] = "tied"
    kind: Literal["language_model"] = "language_model"
    # What the file says to transformers.
    model_type: str = ""
    architectures: tuple[str, ...] = ()


def model_kind(folder: Path) -> str:
    """What kind of model a folder holds; "" where it does not say so, which `read_model_costs` says more of."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=_Kind).kind
    return ""


def read_model_costs(folder: Path, weights: WeightPrecision = "float32") -> LanguageModelCosts:
    """The costs of the model in a folder, by the numbers in its config.json, with `weights` held in that precision.

    Raises: ConfigError for a file that cannot be read, a number that is missing, or a kind without a formula here.
    """
    path = folder / "config.json"
    try:
        data = path.read_bytes()
        kind = msgspec.json.decode(data, type=_Kind).kind
        if kind not in ("", "language_model"):
            raise ConfigError(f"{path} describes a {kind!r}; the costs of a 'language_model' are known")
        config = msgspec.json.decode(data, type=_ModelConfig)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is not the configuration of a model: {error}") from None
    return LanguageModelCosts(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        mlp_size=config.mlp_size,
        mixers=_mixers_of_layers(path, config),
        norm=config.block.norm.kind,
        mlp=config.block.mlp.kind,
        mlp_bias=config.block.mlp.bias,
        concatenated_positions=config.positions == "concatenated",
        learned_positions=0 if isinstance(config.positions, str) else config.positions.length,
        readout=config.readout,
        weights=weights,
    )


def _mixers_of_layers(path: Path, config: _ModelConfig) -> tuple[MixerCosts, ...]:
    if config.mixer.kind == "hybrid" and not config.mixer.pattern:
        raise ConfigError(f"{path}: the mixer is hybrid and has no pattern; it needs the mixers of its layers")
    named = config.mixer.pattern if config.mixer.kind == "hybrid" else (config.mixer,)
    pattern = [mixer_costs(path, mixer, config.hidden_size) for mixer in named]
    return tuple(pattern[layer % len(pattern)] for layer in range(config.num_layers))

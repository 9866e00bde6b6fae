"""The costs of a whole language model or stream encoder, from its folder's config.json; no model is built."""

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from dist_attn.costs.calibration import usual_exchange
from dist_attn.costs.exchanges import (
    all_gather_bytes,
    all_reduce_bytes,
    reshuffle_back_bytes,
    reshuffle_bytes,
    scan_cost,
)
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.model_config.encoders import ContextConfig, EncoderConfig, StreamEncoderConfig
from dist_attn.model_config.figures import FLOAT_BYTES, POSITION_BYTES, TokenFlops, Weights, linear, tokens_at_once
from dist_attn.model_config.folder import read_any_config, read_config
from dist_attn.model_config.language_model import LanguageModelConfig, LearnedPositions, pattern_of
from dist_attn.model_config.mixer import MixerConfig
from dist_attn.model_config.refusal import refusal
from dist_attn.shipped.folder_files import read_file
from dist_attn.wire.choices import WeightPrecision


@dataclass(frozen=True)
class LayerCosts:
    """The costs that a mixer's configuration knows, and those of its traffic by the exchanges that there are."""

    config: MixerConfig

    @property
    def parameters(self) -> int:
        """The number of learned values."""
        return self.config.weights().parameters

    @property
    def travels(self) -> str:
        """The messages between ranks, in words."""
        return self.config.traffic().travels

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations per token, on average over a sequence of `tokens`."""
        return self.config.prefill_flops(tokens, ranks)

    def state_bytes(self, position: int, batch: int = 1) -> int:
        """The bytes that a session keeps after `position` tokens, in float32."""
        return self.config.state_bytes(position, batch)

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """The bytes that a rank sends forward for a sequence of `lengths[r]` tokens on rank r, by usual exchanges."""
        traffic, ranks = self.config.traffic(batch), len(lengths)
        gathered = traffic.gathered_bytes + traffic.edge_bytes + traffic.aside_bytes
        sent = all_gather_bytes(gathered, ranks) + all_reduce_bytes(traffic.reduced, FLOAT_BYTES, ranks)
        if traffic.scanned is not None:
            sent += scan_cost(usual_exchange(traffic.scanned, ranks), traffic.scanned, ranks, rank).bytes_sent
        sent += reshuffle_bytes(lengths, traffic.columns, traffic.column_bytes, rank)
        return sent + reshuffle_back_bytes(lengths, traffic.columns_back, traffic.column_bytes, rank)


def layer_costs(values: Mapping[str, Any]) -> LayerCosts:
    """Read the costs of a mixer of any kind from the values of its configuration.

    Raises: ConfigError for values that are no mixer's.
    """
    try:
        return LayerCosts(MixerConfig.model_validate(values))
    except ValidationError as error:
        where, words = refusal(error, values)
        raise ConfigError(
            f"these values are not the configuration of a mixer: {where or 'the whole'}: {words}"
        ) from None


_HALF_BYTES = 2
_SAVED_BYTES = {"float32": 0, "bfloat16": 2, "int8": 3}  # of each number in a matrix, beside float32
_SCALE_BYTES = 2  # of each row of an int8 matrix


@dataclass(frozen=True)
class _Stack:
    """Layers of a mixer and an MLP with two norms; `config` gives their sizes and number."""

    config: LanguageModelConfig | EncoderConfig | ContextConfig

    @cached_property
    def kinds(self) -> dict[MixerConfig, int]:
        """The different mixers, and how many layers have each."""
        pattern = pattern_of(self.config.mixer)
        return dict(Counter(pattern[layer % len(pattern)] for layer in range(self.config.num_layers)))

    @cached_property
    def mlp(self) -> Weights:
        """The MLP of a layer."""
        size, bias = self.config.mixer.hidden_size, self.config.block.mlp.bias
        return linear(size, self.mlp_inner, bias=bias) + linear(self.config.mlp_size, size, bias=bias)

    @property
    def mlp_inner(self) -> int:
        """The numbers of a token inside the MLP, both halves of a gated one."""
        return self.config.mlp_size * (2 if self.config.block.mlp.kind == "gated" else 1)

    @property
    def norm(self) -> Weights:
        """The numbers of one norm."""
        return Weights(others=(2 if self.config.block.norm.kind == "layer" else 1) * self.config.mixer.hidden_size)

    @cached_property
    def numbers(self) -> Weights:
        """The numbers of all layers."""
        around = (self.mlp + self.norm * 2) * self.config.num_layers
        return sum((mixer.weights() * layers for mixer, layers in self.kinds.items()), around)

    def flops(self, count: Callable[[MixerConfig], TokenFlops]) -> TokenFlops:
        """The operations of all layers for a token: what `count` counts of each mixer, and the MLPs."""
        parts = [(layers, count(mixer)) for mixer, layers in self.kinds.items()]
        summed = {
            part.name: sum(layers * getattr(flops, part.name) for layers, flops in parts) for part in fields(TokenFlops)
        }
        return TokenFlops(**{**summed, "mlp": 2.0 * self.config.num_layers * self.mlp.matrices})

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The larger of the mixer's and the MLP's bytes: four tensors of the width, and two inside (three if gated)."""
        size = self.config.mixer.hidden_size
        mlp = FLOAT_BYTES * batch * tokens * (4 * size + self.config.mlp_size + self.mlp_inner)
        return max(mlp, *(mixer.activation_bytes(tokens, batch) for mixer in self.kinds))


class ModelCosts(ABC):
    """The costs of a model that reads texts of any length; `weights` is the precision of its layers and tables."""

    weights: WeightPrecision

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The width of a hidden state."""

    @property
    @abstractmethod
    def kinds(self) -> Mapping[MixerConfig, int]:
        """The different mixers that go along a text, and how many layers have each."""

    @property
    @abstractmethod
    def numbers(self) -> Weights:
        """The numbers that are held."""

    @abstractmethod
    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations per token, averaged over a sequence of `tokens`; hidden states only, no read-out."""

    @abstractmethod
    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The peak bytes of all temporary tensors in a block of `tokens` per sequence, without gradients."""

    def decode_flops(self, position: int = 0) -> TokenFlops | None:
        """The operations of the token at `position`, with the read-out; None: the model writes none."""
        return None

    def over_layers(self, count: Callable[[MixerConfig], int]) -> int:
        """The sum of what `count` counts of a mixer, over all layers."""
        return sum(layers * count(mixer) for mixer, layers in self.kinds.items())

    @property
    def carry_bytes(self) -> int:
        """The largest state message that a rank contributes to a block in a layer."""
        return max((mixer.traffic().carry_bytes for mixer in self.kinds), default=0)

    @property
    def parameters(self) -> int:
        """The number of learned values in the whole model."""
        return self.numbers.parameters

    @property
    def weights_bytes(self) -> int:
        """The bytes of parameters and buffers as they lie in memory."""
        scales = _SCALE_BYTES * self.numbers.rows if self.weights == "int8" else 0
        return self.read_bytes - _SAVED_BYTES[self.weights] * self.numbers.matrices + scales

    @property
    def read_bytes(self) -> int:
        """The bytes of parameters and buffers in float32, as they are read from the folder."""
        return FLOAT_BYTES * (self.numbers.parameters + self.numbers.buffers)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes that `batch` sessions keep after `position` tokens each."""
        return self.over_layers(lambda mixer: mixer.state_bytes(position, batch))

    def state_bytes_of_rank(self, position: int, ranks: int) -> int:
        """The bytes that one of `ranks` ranks keeps of a session after `position` tokens."""
        return self.over_layers(lambda mixer: mixer.state_bytes(mixer.kept_tokens(position, ranks)))


@dataclass(frozen=True)
class LanguageModelCosts(ModelCosts):
    """The costs of a language model."""

    config: LanguageModelConfig
    weights: WeightPrecision = "float32"

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @cached_property
    def _stack(self) -> _Stack:
        return _Stack(self.config)

    @property
    def kinds(self) -> Mapping[MixerConfig, int]:
        return self._stack.kinds

    @cached_property
    def numbers(self) -> Weights:
        """The numbers that are held: embedding, positions, blocks of mixer, MLP and two norms, final norm, read-out."""
        config, size = self.config, self.config.hidden_size
        total = self._stack.norm + linear(size, config.vocab_size) * (2 if config.readout == "own" else 1)
        if isinstance(config.positions, LearnedPositions):
            total += Weights(others=config.positions.length * size)
        if config.positions == "concatenated":
            total += linear(2 * size, size, bias=True)
        return self._stack.numbers + total

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        return self._all_layers(lambda mixer: mixer.prefill_flops(tokens, ranks))

    def decode_flops(self, position: int = 0) -> TokenFlops:
        parts = self._all_layers(lambda mixer: mixer.decode_flops(position))
        return replace(parts, readout=2.0 * self.hidden_size * self.config.vocab_size)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of the layers, the tokens' positions, and the state after the block, made beside the one before it.

        A product with weights of fewer bits has its inputs and its result as bfloat16 beside those in float32, at most
        those of the MLP, and a copy of its weights: widened from int8 and then packed, which is 2 bytes twice, packed
        alone, or float32. Steps make a copy of the read-out so, at another time.
        """
        size, inner = self.hidden_size, self._stack.mlp_inner
        layer = self._stack.activation_bytes(tokens, batch)
        if self.weights != "float32":
            layer += _HALF_BYTES * batch * tokens * (size + inner)
            largest = max(size * inner, *(mixer.weights().matrices for mixer in self.kinds))
            layer = max(layer + FLOAT_BYTES * largest, FLOAT_BYTES * size * self.config.vocab_size)
        return layer + 2 * POSITION_BYTES * batch * tokens + self.state_bytes(tokens, batch)

    def _all_layers(self, count: Callable[[MixerConfig], TokenFlops]) -> TokenFlops:
        parts = self._stack.flops(count)
        more = 4.0 * self.hidden_size**2 if self.config.positions == "concatenated" else 0.0
        return replace(parts, projections=parts.projections + more)


@dataclass(frozen=True)
class StreamEncoderCosts(ModelCosts):
    """The costs of a stream encoder on a kind of device, whose weights are held in float32."""

    config: StreamEncoderConfig
    weights: WeightPrecision = "float32"
    device: str = "cpu"

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @cached_property
    def _sentence(self) -> _Stack:
        return _Stack(self.config.sentence.encoder)

    @cached_property
    def _context(self) -> _Stack | None:
        return None if self.config.context is None else _Stack(self.config.context)

    @property
    def kinds(self) -> Mapping[MixerConfig, int]:
        return {} if self._context is None else self._context.kinds

    @cached_property
    def numbers(self) -> Weights:
        """The numbers that are held: tables of tokens, types and positions, norms, layers of encoder and context."""
        sentence, size = self.config.sentence, self.hidden_size
        encoder, norm = sentence.encoder, self._sentence.norm
        total = self._sentence.numbers + linear(size, sentence.vocab_size)
        total += Weights(others=(sentence.token_types + (encoder.max_length or 0)) * size)
        total += norm * (int(encoder.embedding_norm) + int(encoder.block.norm_placement == "pre"))
        if encoder.positions == "concatenated":
            total += linear(2 * size, size, bias=True)
        return total if self._context is None else total + self._context.numbers

    @property
    def _framed(self) -> int:
        """The tokens that the sentence encoder reads for a block."""
        return self.config.block + self.config.sentence.frame_tokens

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of whole blocks, each with its frame, and of the context."""
        framed, share = self._framed, self._framed / self.config.block
        parts = [(share, self._sentence.flops(lambda mixer: mixer.prefill_flops(framed)))]
        if self._context is not None:
            parts.append((1.0, self._context.flops(lambda mixer: mixer.prefill_flops(tokens, ranks))))
        names = [part.name for part in fields(TokenFlops)]
        flops = {name: sum(share * getattr(each, name) for share, each in parts) for name in names}
        if self.config.sentence.encoder.positions == "concatenated":
            flops["projections"] += share * 4.0 * self.hidden_size**2
        return TokenFlops(**flops)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The larger of the sentence encoder's bytes, in `tokens_at_once`, and the context's; beside it hidden
        states of all tokens, once in parts and once joined, the tokens' positions, and the state after the block.
        """
        blocks = -(-min(tokens, tokens_at_once(self.device)) // self.config.block)
        layer = self._sentence.activation_bytes(self._framed, blocks * batch)
        if self._context is not None:
            layer = max(layer, self._context.activation_bytes(tokens, batch))
        around = batch * tokens * (2 * FLOAT_BYTES * self.hidden_size + 2 * POSITION_BYTES)
        return layer + around + self.state_bytes(tokens, batch)


class _Kind(msgspec.Struct, frozen=True):
    kind: str = ""


def model_kind(folder: Path) -> str:
    """Read the kind of a folder's model; "" where it does not say so: `read_model_costs` then says why."""
    with contextlib.suppress(ModelFolderError, msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(read_file(folder / "config.json"), type=_Kind).kind
    return ""


def read_model_costs(folder: Path, weights: WeightPrecision = "float32") -> LanguageModelCosts:
    """Read the costs of the language model in a folder from its config.json, with `weights` held in that precision.

    Raises: ConfigError for a file that cannot be read, or that is not the configuration of a language model.
    """
    kind = model_kind(folder)
    if kind not in ("", "language_model"):
        raise ConfigError(f"{folder / 'config.json'} describes a {kind!r}; needed is a 'language_model'")
    try:
        return LanguageModelCosts(read_config(folder), weights)
    except ModelFolderError as error:
        raise ConfigError(str(error)) from None


def read_any_costs(folder: Path, weights: WeightPrecision = "float32", device: str = "cpu") -> ModelCosts:
    """Read the costs of a language model or a stream encoder on a kind of device; as `read_model_costs`.

    Raises: ConfigError also for weights of a stream encoder that are not float32.
    """
    kind = model_kind(folder)
    if kind != "stream_encoder":
        if kind not in ("", "language_model"):
            raise ConfigError(
                f"{folder / 'config.json'} describes a {kind!r}; the costs of a 'language_model' and of a "
                "'stream_encoder' are known"
            )
        return read_model_costs(folder, weights)
    if weights != "float32":
        raise ConfigError(f"weights of {weights} were given, and {folder} holds a {kind}, which has float32 alone")
    try:
        config = read_any_config(folder)
    except ModelFolderError as error:
        raise ConfigError(str(error)) from None
    assert isinstance(config, StreamEncoderConfig)
    return StreamEncoderCosts(config, device=device)

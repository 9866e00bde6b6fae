"""The configuration of a token mixer, which knows its own costs, and the registry of all kinds of mixers.

A kind is built in (`dist_attn.model_config.mixers`), or comes from an installed package: an entry point of the group
`dist_attn.mixers`, named after the kind, whose module calls `register_mixer` when it is loaded.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny

from dist_attn.errors import ConfigError
from dist_attn.model_config.figures import FLOAT_BYTES, TokenFlops, Traffic, Weights
from dist_attn.model_config.registry import Build, KindConfig, Registry, kinds_of, load_build, place_of


@dataclass(frozen=True)
class MixerKind:
    """A configuration class, and what makes the mixer of one of its values."""

    config: "type[MixerConfig]"
    build: Build


MIXERS: Registry[MixerKind] = Registry("dist_attn.mixers", "mixer")


class MixerConfig(KindConfig):
    """The configuration of one layer's mixer, which knows its costs; `kind` is a Literal in every kind.

    Bytes are those of float32 values unless a method says otherwise. `batch` is the number of sequences.
    """

    registry = MIXERS

    hidden_size: int = Field(ge=1)

    # Options that make rows of their own in `dist-attn mixers`, by their names; "" is the kind as it is by default.
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return True

    @property
    def streams(self) -> bool:
        """Return whether there is a state to go on from."""
        return self.causal

    @property
    def packs(self) -> bool:
        """Return whether it takes packed documents, each of which it mixes as if alone."""
        return True

    @abstractmethod
    def weights(self) -> Weights:
        """The numbers that the mixer holds."""

    @abstractmethod
    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes that sessions keep after `position` tokens each; 0 for a mixer that takes a sequence whole."""

    @abstractmethod
    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic between ranks."""

    @abstractmethod
    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations per token, on average over a sequence of `tokens`."""

    def decode_flops(self, position: int) -> TokenFlops:
        """The operations of the token at `position`; by default those of reading, without scores."""
        parts = self.prefill_flops(1)
        return TokenFlops(projections=parts.projections, features=parts.features, state=parts.state)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The most bytes of temporary tensors while `tokens` of each sequence are mixed; here ten of [B, L, D]."""
        return 10 * FLOAT_BYTES * batch * tokens * self.hidden_size

    def kept_tokens(self, position: int, ranks: int) -> int:
        """The number of tokens of which a rank keeps its state: all, where every rank holds the one state."""
        return position

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """The bytes that a rank sends to bring queries, keys and outputs together, over a document in even blocks."""
        return 0

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """The bytes of a rank's memory that the exchange of queries, keys and outputs takes."""
        return 0


AnyMixer = SerializeAsAny[MixerConfig]
"""The type of a field that holds a mixer of any kind, saved with all its options."""


def register_mixer(config: type[MixerConfig], build: Build) -> None:
    """Make the kinds that `config.kind` lists known; `build` makes the mixer, a torch module, of a configuration.

    As a string (`"my_package.modules:MyMixer"`) it is loaded only where mixers are built, so that plans and the service
    can read the configuration without torch.

    Raises: ConfigError for a kind that is registered already, and for a class that names no kind or lacks costs.
    """
    kinds = kinds_of(config)
    if inspect.isabstract(config):
        missing = ", ".join(sorted(config.__abstractmethods__))
        raise ConfigError(f"{place_of(config)} lacks {missing}; a mixer says what it costs")
    MIXERS.register(kinds, MixerKind(config, build), place_of(config))


def mixer_config_class(kind: Any) -> type[MixerConfig]:
    """Find the configuration class of a kind.

    Raises: ConfigError as `Registry.find`.
    """
    return MIXERS.find(kind).config


def registered_mixers() -> dict[str, type[MixerConfig]]:
    """The configuration classes of all kinds that are loaded, by the names of the kinds."""
    return {kind: entry.config for kind, entry in MIXERS.loaded().items()}


def mixer_builder(config: MixerConfig) -> Callable[[Any], Any]:
    """Find the callable that builds the mixer of a configuration.

    Raises: ConfigError for a configuration whose class is not registered.
    """
    known = MIXERS.loaded().get(config.kind)
    if known is None or known.config is not type(config):
        raise ConfigError(f"{type(config).__qualname__} of kind {config.kind!r} is not registered; call register_mixer")
    return load_build(known.build)

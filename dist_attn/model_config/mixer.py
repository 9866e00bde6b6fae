"""The configuration of a token mixer, which knows its own costs, and the registry of all kinds of mixers.

A kind is built in (`dist_attn.model_config.mixers`), or comes from an installed package: an entry point of the group
`dist_attn.mixers`, named after the kind, whose module calls `register_mixer` when it is loaded.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Self, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails

from dist_attn.errors import ConfigError
from dist_attn.model_config.figures import FLOAT_BYTES, TokenFlops, Traffic, Weights

GROUP = "dist_attn.mixers"
"""The group of entry points by which packages offer mixers."""


class FrozenConfig(BaseModel):
    """A frozen value; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MixerConfig(FrozenConfig):
    """The configuration of one layer's mixer, which knows its costs; `kind` is a Literal in every kind.

    Bytes are those of float32 values unless a method says otherwise. `batch` is the number of sequences.
    """

    kind: str
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

    @model_validator(mode="wrap")
    @classmethod
    def _by_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate a field of this type, which holds a mixer of any kind."""
        if cls is not MixerConfig:
            return handler(values)
        if isinstance(values, MixerConfig):
            return cast(Self, values)
        if not isinstance(values, Mapping):
            raise ValueError("a mixer is a table of options, of which kind names what it is")
        if "kind" not in values:
            raise ValueError(f"the mixer's kind is missing; there are {', '.join(_REGISTERED)}")
        kind = values["kind"]
        try:
            return cast(Self, mixer_config_class(kind).model_validate(values))
        except ValidationError as error:
            # The kind is added to an error's place, as for a union, so that a key can be looked for among the kind's
            # own.
            raise ValidationError.from_exception_data(
                error.title, [_below(kind, one) for one in error.errors()]
            ) from None


AnyMixer = SerializeAsAny[MixerConfig]
"""The type of a field that holds a mixer of any kind, saved with all its options."""

Build = str | Callable[[Any], Any]
"""A way from a configuration to its `TokenMixer`: a callable, or its place, "package.module:Name"."""

_REGISTERED: dict[str, tuple[type[MixerConfig], Build]] = {}


def register_mixer(config: type[MixerConfig], build: Build) -> None:
    """Make the kinds that `config.kind` lists known; `build` makes the mixer, a torch module, of a configuration.

    As a string (`"my_package.modules:MyMixer"`) it is loaded only where mixers are built, so that plans and the service
    can read the configuration without torch.

    Raises: ConfigError for a kind that is registered already, and for a class that names no kind or lacks costs.
    """
    where = f"{config.__module__}.{config.__qualname__}"
    kinds = _kinds(config)
    if not kinds:
        raise ConfigError(f'{where} names no kind; give it the field kind: Literal["…"]')
    if inspect.isabstract(config):
        missing = ", ".join(sorted(config.__abstractmethods__))
        raise ConfigError(f"{where} lacks {missing}; a mixer says what it costs")
    for kind in kinds:
        if kind in _REGISTERED:
            other, _ = _REGISTERED[kind]
            raise ConfigError(
                f"{where} is a mixer of kind {kind!r}, which {other.__module__}.{other.__qualname__} is already; "
                "kinds have different names"
            )
    _REGISTERED.update(dict.fromkeys(kinds, (config, build)))


def mixer_config_class(kind: Any) -> type[MixerConfig]:
    """Find the configuration class of a kind; a package that offers the kind is loaded.

    Raises: ConfigError for a kind that is not registered, or whose package cannot be loaded.
    """
    if not isinstance(kind, str) or kind not in _REGISTERED:
        offers = [offer for offer in entry_points(group=GROUP) if offer.name == kind]
        if not offers:
            known = sorted({*_REGISTERED, *entry_points(group=GROUP).names})
            raise ConfigError(f"there is no mixer of kind {kind!r}; there are {', '.join(known)}")
        for offer in offers:
            _load(offer)
    return _REGISTERED[kind][0]


def registered_mixers() -> dict[str, type[MixerConfig]]:
    """The configuration classes of all kinds that are loaded, by the names of the kinds."""
    return {kind: config for kind, (config, _) in _REGISTERED.items()}


def load_offered_mixers() -> None:
    """Load every package that offers a mixer.

    Raises: ConfigError for a package that cannot be loaded, or registers a kind that there is.
    """
    for offer in entry_points(group=GROUP):
        _load(offer)


def mixer_builder(config: MixerConfig) -> Callable[[Any], Any]:
    """Find the callable that builds the mixer of a configuration.

    Raises: ConfigError for a configuration whose class is not registered.
    """
    known, build = _REGISTERED.get(config.kind, (None, ""))
    if known is not type(config):
        raise ConfigError(f"{type(config).__qualname__} of kind {config.kind!r} is not registered; call register_mixer")
    if isinstance(build, str):
        module, _, name = build.partition(":")
        return cast(Callable[[Any], Any], getattr(import_module(module), name))
    return build


def _below(kind: str, error: ErrorDetails) -> InitErrorDetails:
    return InitErrorDetails(
        type=error["type"], loc=(kind, *error["loc"]), input=error["input"], ctx=error.get("ctx", {})
    )


def _kinds(config: type[MixerConfig]) -> tuple[str, ...]:
    field = config.model_fields.get("kind")
    return () if field is None else tuple(kind for kind in get_args(field.annotation) if isinstance(kind, str))


def _load(offer: EntryPoint) -> None:
    package = "a package" if offer.dist is None else f"the package {offer.dist.name}"
    try:
        offer.load()
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"the mixer {offer.name!r} of {package} cannot be loaded from {offer.value}: {why}"
        ) from error
    if offer.name not in _REGISTERED:
        raise ConfigError(f"{package} offers the mixer {offer.name!r}, but {offer.value} does not register that kind")

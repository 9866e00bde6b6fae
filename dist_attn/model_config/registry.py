"""Registries of kinds: those built in, and those that installed packages offer.

A package offers a kind by an entry point that is named after it, in the group of its registry; the module of the entry
point registers the kind when it is loaded. So it is with mixers, attentions, models, tasks and
data for training.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails

from dist_attn.errors import ConfigError

Entry = TypeVar("Entry")
Build = str | Callable[..., Any]
"""A callable that makes something of a kind, or its place, "package.module:Name", loaded where it is needed."""

PAPERS_KINDS = frozenset({
    "efficient", "encoder_decoder", "fnet", "hippo", "images", "listops", "lssl", "masked_autoencoder", "million",
    "mlp_mixer", "needles", "parallel_text", "performer", "s4", "s4d", "scaleformer", "sgconv", "static_kernel",
    "vision_classifier",
})  # fmt: skip
"""The kinds of dist-attn-papers, for the error where it is not installed."""


class FrozenConfig(BaseModel):
    """A frozen value; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Registry(Generic[Entry]):
    """Entries by kind, for each `what` ("mixer"); `group` is that of entry points."""

    def __init__(self, group: str, what: str) -> None:
        self.group, self.what = group, what
        self._entries: dict[str, Entry] = {}
        self._places: dict[str, str] = {}

    def register(self, kinds: Sequence[str], entry: Entry, place: str) -> None:
        """Make kinds known; `place` says where they are defined.

        Raises: ConfigError for a kind that is registered already.
        """
        for kind in kinds:
            if kind in self._entries:
                raise ConfigError(
                    f"{place} is a {self.what} of kind {kind!r}, which {self._places[kind]} is already; kinds have "
                    "different names"
                )
        self._entries.update(dict.fromkeys(kinds, entry))
        self._places.update(dict.fromkeys(kinds, place))

    def find(self, kind: Any) -> Entry:
        """Find the entry of a kind; a package that offers the kind is loaded.

        Raises: ConfigError for a kind that is not registered, or whose package cannot be loaded.
        """
        if not isinstance(kind, str) or kind not in self._entries:
            offers = [offer for offer in entry_points(group=self.group) if offer.name == kind]
            if not offers:
                where = "; `pip install -e papers` in a checkout brings it (dist-attn-papers)"
                raise ConfigError(
                    f"there is no {self.what} of kind {kind!r}; there are {', '.join(self.names())}"
                    + where * (kind in PAPERS_KINDS)
                )
            for offer in offers:
                self._load(offer)
        return self._entries[kind]

    def names(self) -> list[str]:
        """The kinds that are registered, and those that packages offer."""
        return sorted({*self._entries, *entry_points(group=self.group).names})

    def loaded(self) -> dict[str, Entry]:
        """The entries of all kinds that are loaded."""
        return dict(self._entries)

    def load_offered(self) -> None:
        """Load every package that offers a kind.

        Raises: ConfigError for a package that cannot be loaded, or registers a kind that there is.
        """
        for offer in entry_points(group=self.group):
            self._load(offer)

    def _load(self, offer: EntryPoint) -> None:
        package = "a package" if offer.dist is None else f"the package {offer.dist.name}"
        try:
            offer.load()
        except ConfigError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"the {self.what} {offer.name!r} of {package} cannot be loaded from {offer.value}: {why}"
            ) from error
        if offer.name not in self._entries:
            raise ConfigError(
                f"{package} offers the {self.what} {offer.name!r}, but {offer.value} does not register that kind"
            )


def load_build(build: Build) -> Callable[..., Any]:
    """Load the callable at a place."""
    if not isinstance(build, str):
        return build
    module, _, name = build.partition(":")
    return cast(Callable[..., Any], getattr(import_module(module), name))


def place_of(config: type[BaseModel]) -> str:
    """The module and the name of a class."""
    return f"{config.__module__}.{config.__qualname__}"


def kinds_of(config: type[BaseModel]) -> tuple[str, ...]:
    """The kinds that a configuration's field `kind` lists.

    Raises: ConfigError for a class that names none.
    """
    field = config.model_fields.get("kind")
    kinds = () if field is None else tuple(kind for kind in get_args(field.annotation) if isinstance(kind, str))
    if not kinds:
        raise ConfigError(f'{place_of(config)} names no kind; give it the field kind: Literal["…"]')
    return kinds


class KindConfig(FrozenConfig):
    """The base of configurations that a field holds by kind; it has a `registry`, whose entries have a `config`."""

    registry: ClassVar[Registry[Any]]

    kind: str

    @model_validator(mode="wrap")
    @classmethod
    def _by_kind(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate a field of the base's type, which holds a configuration of any kind."""
        if "registry" not in cls.__dict__:
            return handler(values)
        if isinstance(values, cls):
            return values
        what = cls.registry.what
        if not isinstance(values, Mapping):
            raise ValueError(f"a {what} is a table of options, of which kind names what it is")
        if "kind" not in values:
            raise ValueError(f"the {what}'s kind is missing; there are {', '.join(cls.registry.names())}")
        kind = values["kind"]
        try:
            return cast(Self, cls.registry.find(kind).config.model_validate(values))
        except ValidationError as error:
            # The kind is added to an error's place, as for a union, so that a key can be looked for among the kind's
            # own.
            raise ValidationError.from_exception_data(
                error.title, [_below(kind, one) for one in error.errors()]
            ) from None


def _below(kind: str, error: ErrorDetails) -> InitErrorDetails:
    return InitErrorDetails(
        type=error["type"], loc=(kind, *error["loc"]), input=error["input"], ctx=error.get("ctx", {})
    )

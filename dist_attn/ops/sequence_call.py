"""An operation along the sequence with its arguments as one value, and the functions that compute it.

A call says which of its tensors lie along the tokens and what else ranks must have in common. Its form where the whole
sequence lies in one process is registered by `local_form`, that over ranks by `dist_attn.sharded.over_ranks`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar

from dist_attn.errors import ConfigError

Implementation = Literal["auto", "streaming", "native", "triton", "fla"]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SequenceCall(Generic[Result]):
    """A call of one operation along the sequence, a subclass for each, with a result of type `Result`.

    Class attributes:
        operation      the name.
        along          the fields whose tensors lie along the tokens, at dimension `dim`.
        along_memory   such fields of keys, which lie on a layout of their own where one is given.
        of_rank        fields that may differ from rank to rank; ranks must have all others in common.
        packs          it takes packed documents.
        deterministic  over ranks it has the same bits for any number of ranks, where they are asked for.

    `documents`, the positions at which packed documents start, and `implementation` are set by the `SequenceOps` that
    runs the call.
    """

    documents: tuple[int, ...] = ()
    implementation: Implementation = "auto"

    operation: ClassVar[str]
    along: ClassVar[tuple[str, ...]] = ()
    along_memory: ClassVar[tuple[str, ...]] = ()
    dim: ClassVar[int] = 1
    of_rank: ClassVar[tuple[str, ...]] = ()
    packs: ClassVar[bool] = True
    deterministic: ClassVar[bool] = False

    def settings(self) -> dict[str, object]:
        """The arguments that all ranks must have in common, beside those along the tokens."""
        others = {*self.along, *self.along_memory, *self.of_rank, "documents", "implementation"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}


Form = TypeVar("Form", bound=Callable[..., Any])
Forms = dict[type[SequenceCall[Any]], Callable[..., Any]]
_LOCAL: Forms = {}


def local_form(kind: type[SequenceCall[Any]]) -> Callable[[Form], Form]:
    """Register a function of a call of this kind as its form where the whole sequence lies in one process."""
    return register_form(_LOCAL, kind)


def run_locally(call: SequenceCall[Result]) -> Result:
    """Compute a call whose sequence lies whole in this process.

    Raises: ConfigError for a kind of call without a registered form.
    """
    return find_form(_LOCAL, call, "local_form")(call)  # type: ignore[no-any-return]


def register_form(forms: Forms, kind: type[SequenceCall[Any]]) -> Callable[[Form], Form]:
    """A decorator that puts a function among these forms."""

    def register(form: Form) -> Form:
        forms[kind] = form
        return form

    return register


def find_form(forms: Forms, call: SequenceCall[Any], decorator: str) -> Callable[..., Any]:
    """The form of this kind of call.

    Raises: ConfigError where there is none.
    """
    kind = type(call)
    if kind not in forms:
        raise ConfigError(f"{kind.__name__} has no such form; register one: @{decorator}({kind.__name__})")
    return forms[kind]

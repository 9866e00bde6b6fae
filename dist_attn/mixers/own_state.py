"""The check that a state given to a mixer is one that it could have left: of its kind, with the sizes that it needs."""

from collections.abc import Sequence
from typing import TypeVar

from dist_attn.errors import InputError
from dist_attn.mixers.base import MixerState

__all__ = ["require_own"]

State = TypeVar("State", bound=MixerState)


def require_own(state: MixerState, own: type[State], kind: str, shapes: Sequence[tuple[int | None, ...]]) -> State:
    """The state as what it is. `shapes` are those of its tensors, in order; None stands for any number.

    States that several kinds of mixers share say in `kind` which one left them: sizes may be equal by chance.

    Raises: InputError for a state of another kind or with other sizes, with what was given and what is needed.
    """
    given = [tuple(tensor.shape) for tensor in state.tensors()]
    left_by = getattr(state, "kind", kind)
    if not isinstance(state, own) or left_by != kind or not _fit(given, shapes):
        name = type(state).__name__ if not hasattr(state, "kind") else f"{type(state).__name__} of {left_by}"
        raise InputError(
            f"a {name} with tensors {_words(given)} was given to {kind}; it needs its own state, a {own.__name__} with "
            f"tensors {_words(shapes)}"
        )
    return state


def _fit(given: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int | None, ...]]) -> bool:
    return len(given) == len(shapes) and all(
        len(has) == len(needs) and all(need is None or size == need for size, need in zip(has, needs, strict=True))
        for has, needs in zip(given, shapes, strict=True)
    )


def _words(shapes: Sequence[tuple[int | None, ...]]) -> str:
    return ", ".join("[" + ", ".join("any" if size is None else str(size) for size in shape) + "]" for shape in shapes)

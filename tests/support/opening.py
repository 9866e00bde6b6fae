"""The messages that open work in the engine: the one place of the tests that knows how they look."""

from typing import TypeGuard

from dist_attn.wire.messages import AnyMessage, BeginState, Keep, OpenWork, RowSpec, SamplingSpec
from dist_attn.wire.specs import Terms


def open_encoding(name: str, rows: RowSpec, terms: Terms = Terms()) -> AnyMessage:  # noqa: B008 - immutable
    """The message that opens an encoding."""
    return OpenWork(name, rows=rows, terms=terms)


def open_completion(
    name: str,
    sampling: SamplingSpec,
    terms: Terms = Terms(),  # noqa: B008 - immutable
    begin: BeginState | None = None,
    states_at: tuple[int, ...] = (),
) -> AnyMessage:
    """The message that opens a completion."""
    return OpenWork(name, begin, None, sampling, Keep(at=states_at), terms)


def open_session(
    name: str,
    begin: BeginState | None = None,
    rows: RowSpec | None = None,
    sampling: SamplingSpec | None = None,
    checkpoint_tokens: int = 0,
) -> AnyMessage:
    """The message that goes on with a session."""
    return OpenWork(name, begin, rows, sampling, Keep(checkpoint_tokens, end=True))


def is_encoding(message: AnyMessage) -> bool:
    """Whether it opens an encoding."""
    return is_opening(message) and message.kind == "encoding"


def is_completion(message: AnyMessage) -> bool:
    """Whether it opens a completion."""
    return is_opening(message) and message.kind == "completion"


def is_session(message: AnyMessage) -> bool:
    """Whether it goes on with a session."""
    return is_opening(message) and message.kind == "session"


def is_opening(message: AnyMessage) -> TypeGuard[OpenWork]:
    """Whether it opens anything."""
    return isinstance(message, OpenWork)


def draw_of(message: AnyMessage) -> SamplingSpec | None:
    """How the opened work draws tokens."""
    assert is_opening(message)
    return message.draw


def states_at(message: AnyMessage) -> tuple[int, ...]:
    """Where a completion hands out states of its prompt."""
    assert is_opening(message)
    return message.keep.at


def states_every(message: AnyMessage) -> int:
    """At which multiples a session hands out its states."""
    assert is_opening(message)
    return message.keep.every

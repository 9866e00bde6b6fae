"""The messages that open work in the engine: the one place of the tests that knows how they look."""

from dist_attn.wire.messages import AnyMessage, OpenCompletion, OpenEncoding, RowSpec, SamplingSpec
from dist_attn.wire.session_messages import BeginState, OpenSession
from dist_attn.wire.terms import Terms


def open_encoding(name: str, rows: RowSpec, terms: Terms = Terms()) -> AnyMessage:  # noqa: B008 - immutable
    """The message that opens an encoding."""
    return OpenEncoding(name, rows, terms)


def open_completion(
    name: str,
    sampling: SamplingSpec,
    terms: Terms = Terms(),  # noqa: B008 - immutable
    begin: BeginState | None = None,
    states_at: tuple[int, ...] = (),
) -> AnyMessage:
    """The message that opens a completion."""
    return OpenCompletion(name, sampling, terms, begin, states_at)


def open_session(
    name: str,
    begin: BeginState | None = None,
    rows: RowSpec | None = None,
    sampling: SamplingSpec | None = None,
    checkpoint_tokens: int = 0,
) -> AnyMessage:
    """The message that goes on with a session."""
    return OpenSession(name, begin, rows, sampling, checkpoint_tokens)


def is_encoding(message: AnyMessage) -> bool:
    """Whether it opens an encoding."""
    return isinstance(message, OpenEncoding)


def is_completion(message: AnyMessage) -> bool:
    """Whether it opens a completion."""
    return isinstance(message, OpenCompletion)


def is_session(message: AnyMessage) -> bool:
    """Whether it goes on with a session."""
    return isinstance(message, OpenSession)


def is_opening(message: AnyMessage) -> bool:
    """Whether it opens anything."""
    return is_encoding(message) or is_completion(message) or is_session(message)


def draw_of(message: AnyMessage) -> SamplingSpec | None:
    """How the opened work draws tokens."""
    assert isinstance(message, OpenCompletion | OpenSession)
    return message.sampling


def states_at(message: AnyMessage) -> tuple[int, ...]:
    """Where a completion hands out states of its prompt."""
    assert isinstance(message, OpenCompletion)
    return message.states_at


def states_every(message: AnyMessage) -> int:
    """At which multiples a session hands out its states."""
    assert isinstance(message, OpenSession)
    return message.checkpoint_tokens

"""Work opened by the API's own end of the engine: the one place of the tests that knows its calls."""

from collections.abc import Callable
from typing import Any

from dist_attn_service.engine.port import EnginePort, OpenStreams
from dist_attn_service.engine.resending import GivenMemory
from dist_attn_service.engine.stream import EngineStream, StreamLimits

from dist_attn.wire.messages import AnyMessage, BeginState, Keep, OpenWork, RowSpec, SamplingSpec
from dist_attn.wire.specs import Terms

Post = Callable[[AnyMessage], None]
Opener = EnginePort | OpenStreams


class Desk:
    """The other end of streams: what they post, and what a test lets come."""

    def __init__(self, limits: StreamLimits, memory: GivenMemory | None = None) -> None:
        self.posted: list[AnyMessage] = []
        self.streams = OpenStreams(limits, memory)

    def last(self, of_kind: Callable[[AnyMessage], bool]) -> Any:
        """The newest message of a kind."""
        return next(message for message in reversed(self.posted) if of_kind(message))


def begin_encoding(
    opener: Opener, rows: RowSpec | None = None, *, name: str = "", terms: Terms | None = None, post: Post | None = None
) -> EngineStream:
    """An encoding, opened by a port, or by streams that `post`."""
    return _begin(opener, OpenWork(name, rows=rows or RowSpec(), terms=terms or Terms()), post)


def begin_completion(
    opener: Opener,
    sampling: SamplingSpec,
    begin: BeginState | None = None,
    states_at: tuple[int, ...] = (),
    *,
    name: str = "",
    terms: Terms | None = None,
    post: Post | None = None,
) -> EngineStream:
    """A completion, opened likewise."""
    return _begin(opener, OpenWork(name, begin, None, sampling, Keep(at=states_at), terms or Terms()), post)


def begin_session(
    opener: Opener,
    begin: BeginState | None = None,
    sampling: SamplingSpec | None = None,
    checkpoint_tokens: int = 0,
    *,
    post: Post | None = None,
) -> EngineStream:
    """A session, opened likewise."""
    return _begin(opener, OpenWork("", begin, draw=sampling, keep=Keep(checkpoint_tokens, end=True)), post)


def _begin(opener: Opener, work: OpenWork, post: Post | None) -> EngineStream:
    return opener.open(work) if post is None else opener.open(work, post)

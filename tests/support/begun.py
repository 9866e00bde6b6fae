"""Work opened by the API's own end of the engine: the one place of the tests that knows its calls."""

from collections.abc import Callable

from dist_attn_service.engine.port import EnginePort, OpenStreams
from dist_attn_service.engine.stream import EngineStream

from dist_attn.wire.messages import AnyMessage, BeginState, Keep, OpenWork, RowSpec, SamplingSpec
from dist_attn.wire.specs import Terms

Post = Callable[[AnyMessage], None]
Opener = EnginePort | OpenStreams


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

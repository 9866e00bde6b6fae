"""Work opened by the API's own end of the engine: the one place of the tests that knows its calls."""

from collections.abc import Callable

from dist_attn_service.engine.completion_stream import CompletionStream, CompletionWork
from dist_attn_service.engine.open_streams import OpenStreams
from dist_attn_service.engine.port import EnginePort
from dist_attn_service.engine.session_stream import SessionStream, SessionWork
from dist_attn_service.engine.stream import EngineStream

from dist_attn.wire.messages import AnyMessage, RowSpec, SamplingSpec
from dist_attn.wire.session_messages import BeginState
from dist_attn.wire.terms import Terms

Post = Callable[[AnyMessage], None]
Opener = EnginePort | OpenStreams


def begin_encoding(
    opener: Opener, rows: RowSpec | None = None, *, name: str = "", terms: Terms | None = None, post: Post | None = None
) -> EngineStream:
    """An encoding, opened by a port, or by streams that `post`."""
    return opener.open(rows or RowSpec(), **_post(post), name=name, terms=terms)


def begin_completion(
    opener: Opener,
    sampling: SamplingSpec,
    begin: BeginState | None = None,
    states_at: tuple[int, ...] = (),
    *,
    name: str = "",
    terms: Terms | None = None,
    post: Post | None = None,
) -> CompletionStream:
    """A completion, opened likewise."""
    work = CompletionWork(sampling, begin, states_at)
    return opener.open_completion(work, **_post(post), name=name, terms=terms)


def begin_session(
    opener: Opener,
    begin: BeginState | None = None,
    sampling: SamplingSpec | None = None,
    checkpoint_tokens: int = 0,
    *,
    post: Post | None = None,
) -> SessionStream:
    """A session, opened likewise."""
    work = SessionWork(begin, sampling=sampling, checkpoint_tokens=checkpoint_tokens)
    return opener.open_session(work, **_post(post))


def _post(post: Post | None) -> dict[str, Post]:
    return {} if post is None else {"post": post}

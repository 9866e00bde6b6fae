"""The message that opens a request."""

from dist_attn.wire.messages import AnyMessage, OpenCompletion, OpenEncoding
from dist_attn.wire.session_messages import OpenSession, OpenWork

__all__ = ["opening"]


def opening(work: OpenWork) -> AnyMessage:
    """Which of the three messages says this."""
    if work.keep.end:
        return OpenSession(work.request_id, work.begin, work.rows, work.draw, work.keep.every, work.terms)
    if work.draw is not None:
        return OpenCompletion(work.request_id, work.draw, work.terms, work.begin, work.keep.at)
    assert work.rows is not None
    return OpenEncoding(work.request_id, work.rows, work.terms)

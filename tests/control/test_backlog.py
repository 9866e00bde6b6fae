"""Room for one more request: by number, by tokens that are still to be read or drawn, by class."""

from dist_attn.control.backlog import refusal
from dist_attn.control.pace import Pace
from dist_attn.control.sessions import Session
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.terms import Terms


def session(tokens, *, priority=1, draws=0, **fields):
    """A request that has announced so many tokens."""
    sampling = SamplingSpec(draws) if draws else None
    return Session(1, b"api", "a", 0.0, sampling=sampling, terms=Terms(priority, tokens=tokens), **fields)


def asked(new, *others, max_open=10, limit=1000, token_s=0.0):
    """What is told to it."""
    return refusal(new, others, max_open=max_open, max_waiting_tokens=limit, pace=Pace(token_s))


def test_what_is_left_counts_not_what_was_sent():
    """Tokens that are read already, or drawn, leave room; announced ones take it, until the input is complete."""
    assert asked(session(500), session(400)) is None
    assert "limit of this engine is 1000" in asked(session(500), session(600))[0]
    assert asked(session(500), session(600, dispatched=200)) is None
    assert asked(session(500), session(None, draws=600)) is not None
    assert asked(session(500), session(None, draws=600, draws_asked=200)) is None
    assert asked(session(500), session(900, received=300, final=True)) is None
    assert asked(session(500), session(None, received=900)) is not None


def test_alone_anything_is_taken():
    """A text that is longer than all that may wait is still read when nothing else does."""
    assert asked(session(1 << 40)) is None


def test_less_urgent_work_takes_no_room():
    """What may wait does not keep others out; what is more urgent does."""
    assert asked(session(500, priority=0), session(900, priority=1), session(900, priority=2)) is None
    assert asked(session(500, priority=2), session(900, priority=0)) is not None


def test_when_to_come_again_follows_from_the_speed():
    """The surplus at the speed of the last steps, a second at least and no longer than clients wait by themselves."""
    assert asked(session(500), session(600))[1] == 1
    assert asked(session(500), session(600), token_s=0.1)[1] == 10
    assert asked(session(500), session(10**6), token_s=0.1)[1] == 120
    assert asked(session(5), session(70), session(600), max_open=2, token_s=0.1) == (
        "2 requests are open, which is the limit of this engine; try again soon",
        7,
    )

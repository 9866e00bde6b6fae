"""Room for one more request: by number, by tokens that are still to be read or drawn, by class."""

from dist_attn.control.intake import refusal
from dist_attn.control.requests import Request
from dist_attn.control.steps import Pace
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.specs import Terms
from tests.support.opening import open_completion, open_encoding


def request(tokens, *, priority=1, draws=0, received=0, final=False, read=0, asked_for=0):
    """A request that has announced so many tokens, of which some have come and some are read or drawn."""
    terms = Terms(priority, tokens=tokens)
    message = open_completion("a", SamplingSpec(draws), terms) if draws else open_encoding("a", RowSpec(), terms)
    made = Request.opened_by(message, 1, b"api", 0.0, 512)
    made.reading.push(bytes(4 * max(received, read)), final, 0.0)
    made.reading.take(read)
    made.reading.end_block(read)
    for _ in range(asked_for):
        made.drawing.ask(0)
    return made


def asked(new, *others, max_open=10, limit=1000, token_s=0.0):
    """What is told to it."""
    return refusal(new, others, max_open=max_open, max_waiting_tokens=limit, pace=Pace(token_s))


def test_what_is_left_counts_not_what_was_sent():
    """Tokens that are read already, or drawn, leave room; announced ones take it, until the input is complete."""
    assert asked(request(500), request(400)) is None
    assert "limit of this engine is 1000" in asked(request(500), request(600))[0]
    assert asked(request(500), request(600, read=200)) is None
    assert asked(request(500), request(None, draws=600)) is not None
    assert asked(request(500), request(None, draws=600, asked_for=200)) is None
    assert asked(request(500), request(900, received=300, final=True)) is None
    assert asked(request(500), request(None, received=900)) is not None


def test_alone_anything_is_taken():
    """A text that is longer than all that may wait is still read when nothing else does."""
    assert asked(request(1 << 40)) is None


def test_less_urgent_work_takes_no_room():
    """What may wait does not keep others out; what is more urgent does."""
    assert asked(request(500, priority=0), request(900, priority=1), request(900, priority=2)) is None
    assert asked(request(500, priority=2), request(900, priority=0)) is not None


def test_when_to_come_again_follows_from_the_speed():
    """The surplus at the speed of the last steps, a second at least and no longer than clients wait by themselves."""
    assert asked(request(500), request(600))[1] == 1
    assert asked(request(500), request(600), token_s=0.1)[1] == 10
    assert asked(request(500), request(10**6), token_s=0.1)[1] == 120
    assert asked(request(5), request(70), request(600), max_open=2, token_s=0.1) == (
        "2 requests are open, which is the limit of this engine; try again soon",
        7,
    )

"""Outboxes: order is kept, a peer that never reads is given up, and memory is bounded."""

from dist_attn.control.open_requests import MOST_WAITING, Outboxes
from dist_attn.wire.messages import Accepted
from dist_attn.wire.sockets import Sent


class Wire:
    """A peer that takes as many messages as it is allowed to."""

    def __init__(self):
        self.room, self.taken = 0, []

    def send(self, peer, message):
        if len(self.taken) >= self.room:
            return Sent.FULL
        self.taken.append(message.request_id)
        return Sent.DONE


def test_what_waits_goes_first():
    """Messages arrive in the order they were posted, also when there is room again in between."""
    wire = Wire()
    boxes = Outboxes(wire.send, deadline_s=5.0)
    assert boxes.post(b"p", Accepted("0"), 0.0) is Sent.FULL
    wire.room = 10
    assert boxes.post(b"p", Accepted("1"), 0.0) is Sent.FULL
    assert boxes.blocked(b"p")
    assert boxes.flush(0.0) == []
    assert wire.taken == ["0", "1"]
    assert not boxes.blocked(b"p")


def test_a_peer_that_takes_nothing_is_given_up():
    """After the deadline the peer counts as gone and its messages are dropped; one message taken starts it anew."""
    wire = Wire()
    boxes = Outboxes(wire.send, deadline_s=5.0)
    for name in "01":
        boxes.post(b"p", Accepted(name), 0.0)
    wire.room = 1
    assert boxes.flush(4.0) == []
    assert boxes.flush(8.0) == []
    assert boxes.flush(9.5) == [b"p"]
    assert not boxes.blocked(b"p")


def test_an_outbox_has_an_end():
    """A peer that goes on asking without reading is gone once its outbox is full, and nothing more is kept for it."""
    boxes = Outboxes(Wire().send, deadline_s=5.0)
    sent = [boxes.post(b"p", Accepted("x"), 0.0) for _ in range(MOST_WAITING + 2)]
    assert sent == [Sent.FULL] * MOST_WAITING + [Sent.GONE] * 2

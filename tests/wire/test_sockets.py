"""Router and dealer: messages arrive, dead and lazy peers are noticed, and nothing waits for ever."""

import tempfile
import time

import pytest
import zmq

from dist_attn.errors import ConfigError, WireError
from dist_attn.wire.messages import Cancel, Tokens
from dist_attn.wire.rank_messages import Ping
from dist_attn.wire.sockets import QUEUE_MESSAGES, Dealer, Router, Sent


@pytest.fixture
def context():
    """A ZeroMQ context that must be free of sockets at the end."""
    context = zmq.Context(1)
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address():
    """An address that nobody uses; its path is short, which the path of a socket has to be."""
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        yield f"ipc://{folder}/s"


def receive(router, timeout_s=60.0):
    """The router's next message, waited for."""
    assert router.socket.poll(int(timeout_s * 1000)), "nothing arrived"
    return router.receive()


def test_messages_go_both_ways(context, address):
    """A dealer is known by its identity, and gets what is sent to it."""
    with Router(context, address) as router, Dealer(context, address, "me") as dealer:
        dealer.send(Cancel("a"))
        assert receive(router) == (b"me", Cancel("a"))
        assert router.send(b"me", Ping()) is Sent.DONE
        assert dealer.receive(60.0) == Ping()


def test_an_empty_socket_does_not_wait(context, address):
    """A router returns at once, a dealer after its timeout, with None."""
    with Router(context, address) as router, Dealer(context, address, "me") as dealer:
        assert router.receive() is None
        assert dealer.receive(0.05) is None


def test_a_peer_that_was_never_there_is_gone(context, address):
    """Sending to an unknown identity is reported, not swallowed."""
    with Router(context, address) as router:
        assert router.send(b"nobody", Ping()) is Sent.GONE


def test_a_peer_that_has_left_is_gone(context, address):
    """After a dealer closed, sending to it is reported soon."""
    with Router(context, address) as router:
        with Dealer(context, address, "me") as dealer:
            dealer.send(Ping())
            receive(router)
        deadline = time.monotonic() + 60
        while router.send(b"me", Ping()) is not Sent.GONE:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_peer_that_does_not_read_is_full(context, address):
    """The queue to a peer is bounded, and a full one is reported instead of waited for."""
    with Router(context, address) as router, Dealer(context, address, "me") as dealer:
        dealer.send(Ping())
        receive(router)
        message = Tokens("a", 0, bytes(64 << 10), False)
        # The kernel's buffers take some in the background.
        answers = [router.send(b"me", message) for _ in range(8 * QUEUE_MESSAGES)]
        assert set(answers) == {Sent.DONE, Sent.FULL}
        assert answers.count(Sent.DONE) < 4 * QUEUE_MESSAGES


def test_a_dealer_without_a_peer_gives_up_in_time(context, address):
    """What a dealer queues for a peer that is not there is bounded; then sending raises after the timeout."""
    with Dealer(context, address, "me") as dealer:
        with pytest.raises(WireError, match="the peer does not read"):
            for _ in range(QUEUE_MESSAGES + 1):
                dealer.send(Ping(), 0.05)
        dealer.socket.close(0)


def test_an_unreadable_message_comes_back_as_an_error(context, address):
    """Garbage from one peer is a value for the router and an exception for the dealer."""
    with Router(context, address) as router, Dealer(context, address, "me") as dealer:
        dealer.socket.send(b"garbage")
        peer, message = receive(router)
        assert peer == b"me"
        assert isinstance(message, WireError)
        dealer.socket.send_multipart((b"two", b"parts"))
        assert isinstance(receive(router)[1], WireError)
        router.socket.send_multipart((b"me", b"garbage"))
        with pytest.raises(WireError):
            dealer.receive(60.0)


@pytest.mark.parametrize(
    "address", ["", "nothing", "inproc://x", "ipc://", "ipc://" + "x" * 200, "tcp://", "ipc:///a,tcp://b:1"]
)
def test_addresses_that_cannot_be_used_are_refused(context, address):
    """The error names the address that was given."""
    with pytest.raises(ConfigError, match=address[:20] or "''"):
        Router(context, address)
    with pytest.raises(ConfigError):
        Dealer(context, address, "me")


def test_an_address_that_cannot_be_bound_is_refused(context, tmp_path):
    """Listening in a folder that does not exist is a configuration error."""
    with pytest.raises(ConfigError, match="cannot listen"):
        Router(context, f"ipc://{tmp_path}/missing/s")

"""A real controller, agent and ranks (with the fake model): requests of all kinds, side by side, and bad ones."""

import numpy as np
import pytest

from dist_attn.wire.messages import BeginState, Credit, RowSpec, SamplingSpec, Tokens
from tests.support.controller_client import ControllerClient
from tests.support.engines import running_engine
from tests.support.fake_rank import END, SLOW, VOCAB, fake_hidden, fake_next
from tests.support.opening import open_session
from tests.support.pairs import each_pair

TOKENS = np.random.default_rng(0).integers(0, 900, 40_000)


@pytest.fixture(scope="module", params=[1, 3])
def engine(request):
    """A ready engine that the tests of this module share."""
    with running_engine(ranks=request.param) as (handle, _, _):
        yield handle


@pytest.fixture
def client(engine):
    """A connection of its own for each test."""
    with ControllerClient(engine.api_address) as client:
        yield client


def drawn_after(token, count):
    """What the fake model draws after a prompt that ends with `token`, and why it stops."""
    tokens = []
    while len(tokens) < count:
        token = fake_next(token)
        if token == END:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


@pytest.mark.parametrize(
    ("total", "window", "pooling"), each_pair((1, 511, 512, 10_000, 40_000), (1, 100, 512, 3000), ("mean", "last"))
)
def test_an_encoding_returns_every_row_in_order(client, total, window, pooling):
    """Rows of any window are those of the whole document, whatever the ranks and blocks were."""
    tokens = TOKENS[:total]
    request = client.encode("a", tokens, RowSpec("window", window, pooling))
    hidden = fake_hidden(tokens, 0)
    starts = list(range(0, total, window))
    assert (request.starts, request.stops) == (starts, [min(total, start + window) for start in starts])
    stops = np.array(request.stops)
    sums = np.add.reduceat(hidden, starts, dtype=np.float64)  # of small whole numbers, so exact in any order
    wanted = sums / (stops - starts)[:, None] if pooling == "mean" else hidden[stops - 1]
    np.testing.assert_array_equal(request.rows, wanted.astype(np.float32))
    assert (request.done.position, request.done.rows) == (total, len(starts))


def test_a_row_per_token_and_one_per_document(client):
    """The other granularities come through the same path."""
    hidden = fake_hidden(TOKENS, 0)
    np.testing.assert_array_equal(client.encode("t", TOKENS, RowSpec("token")).rows, hidden)
    row = client.encode("d", TOKENS, RowSpec("document")).rows
    np.testing.assert_array_equal(row, hidden.mean(0, dtype=np.float64).astype(np.float32)[None])


def test_rows_arrive_before_the_input_ends(client):
    """A client that is still sending gets the rows of each block that it has sent, 512 tokens for each rank."""
    ranks = len(client.status().ranks)
    sent, request = 512 * ranks + 276, client.open_encoding("a")
    client.feed("a", TOKENS[:sent], final=False)
    client.wait_until(lambda: len(request.starts) == ranks, what="the rows of a block")
    client.feed("a", TOKENS[sent : sent + 100], start=sent)
    assert client.finish("a").stops == [*range(512, 512 * ranks + 1, 512), sent + 100]


@pytest.mark.parametrize("length", [1, 2, 513, 9000])
def test_a_completion_draws_after_its_prompt(client, length):
    """Prompts of any length; the prompt's last token is fed by decoding, and the limit ends it."""
    prompt = [*TOKENS[: length - 1], 11]
    request = client.complete("a", prompt, SamplingSpec(12))
    assert (request.tokens, request.finish_reason) == drawn_after(11, 12)


def test_the_end_token_stops_a_completion_and_is_not_sent(client):
    """A token after which the model soon draws its end token."""
    first = next(token for token in range(900) if 2 <= len(drawn_after(token, 50)[0]) < 50)
    request = client.complete("a", [1, 2, first], SamplingSpec(50))
    assert (request.tokens, request.finish_reason) == drawn_after(first, 50)
    assert request.finish_reason == "stop"


def test_many_requests_side_by_side(client):
    """Encodings and completions that run together give what each gives alone."""
    for n in range(20):
        client.open_completion(f"c{n}", SamplingSpec(5 + n))
    for n in range(4):
        client.open_encoding(f"e{n}")
    for n in range(4):
        client.feed(f"e{n}", TOKENS[n : n + 20_000])
    for n in range(20):
        client.feed(f"c{n}", [*TOKENS[: 37 * n], n])
    for n in range(20):
        request = client.finish(f"c{n}")
        assert (request.tokens, request.finish_reason) == drawn_after(n, 5 + n)
    for n in range(4):
        request = client.finish(f"e{n}")
        hidden = fake_hidden(TOKENS[n : n + 20_000], 0)
        np.testing.assert_array_equal(request.rows[3], hidden[1536:2048].mean(0, dtype=np.float64).astype(np.float32))
        assert request.done.rows == 40


def test_decoding_goes_on_beside_a_long_document(client):
    """A completion that arrives while a document is prefilled ends long before the document does."""
    slow = np.full(400_000, SLOW)
    client.open_encoding("long")
    client.feed("long", slow[:16_384], final=False)
    client.complete("short", [5, 6, 8], SamplingSpec(10))
    assert not client.requests["long"].ended
    client.cancel("long")


def test_cancelled_work_stops(client):
    """After a cancel no further step is spent on the request."""
    client.open_encoding("a")
    client.feed("a", np.full(8000, SLOW), final=False)
    client.wait_until(lambda: client.requests["a"].starts, what="a row")
    client.cancel("a")
    client.wait_for_status(lambda status: status.active == status.queued == 0)
    rows = len(client.requests["a"].starts)
    client.complete("b", [3], SamplingSpec(3))
    assert len(client.requests["a"].starts) == rows


def test_the_requests_of_a_client_that_died_end(client, engine):
    """An API process that is gone leaves no work behind, even if it owed tokens."""
    with ControllerClient(engine.api_address) as other:
        other.open_encoding("a")
        other.wait_until(lambda: other.requests["a"].accepted)
        held = client.status()
    assert held.active + held.queued == 1
    status = client.wait_for_status(lambda status: status.active == status.queued == 0)
    assert status.ready and status.epoch == 1


def test_a_token_that_the_model_does_not_know_fails_only_its_request(client):
    """The ranks never see it."""
    client.open_encoding("bad")
    client.feed("bad", [VOCAB])
    client.wait_until(lambda: client.requests["bad"].ended)
    assert client.requests["bad"].failed.code == "invalid_value"
    client.encode("good", TOKENS[:10])
    assert client.status().epoch == 1


def test_garbage_on_the_socket_hurts_nobody(client):
    """Unreadable and misplaced messages are dropped, and the engine goes on."""
    client._dealer.socket.send(b"\xff\xfe garbage")
    client._dealer.socket.send_multipart((b"many", b"parts"))
    client.send(Credit("a", 5))
    assert client.encode("b", TOKENS[:100]).done.rows == 1


def test_status_tells_what_the_engine_is(client, engine):
    """Model, sizes and every rank with its process."""
    status = client.wait_ready()
    assert (status.model, status.hidden_size, status.vocab_size, status.reason) == ("fake", 4, VOCAB, "ready")
    assert [rank.rank for rank in status.ranks] == list(range(engine.settings.ranks))
    assert len({rank.pid for rank in status.ranks}) == engine.settings.ranks


def test_what_cannot_be_read_ends_its_request_alone(client):
    """Whether it opens a request or belongs to an open one: the sender hears of it at once, and others go on."""
    client.send(open_session("new", BeginState(1 << 60, "00", "00", 100)))
    client.open_encoding("open")
    client.open_encoding("other")
    client.send(Tokens("open", 1 << 60, b"", False))
    client.feed("other", TOKENS[:600])
    for name in ("new", "open"):
        client.wait_until(lambda name=name: client.requests[name].ended, what=f"the end of {name}")
        failed = client.requests[name].failed
        assert failed.code == "invalid_value" and "unreadable message" in failed.message
    assert client.finish("other").done.rows == 2

"""The side that faces the API: admission, credit, tokens in, answers out, readers that are slow or gone."""

import numpy as np
import pytest

from dist_attn.control.desk import Desk
from dist_attn.control.settings import ControlSettings
from dist_attn.wire.messages import (
    Accepted,
    Cancel,
    Credit,
    EncodingDone,
    Failed,
    Generated,
    Progress,
    Rows,
    RowSpec,
    SamplingSpec,
    TokenLogprobs,
    Tokens,
)
from dist_attn.wire.rank_messages import RankHello, RowPieces
from dist_attn.wire.sockets import Sent
from dist_attn.wire.terms import Terms
from tests.support.opening import open_completion, open_encoding
from tests.support.states import MemoryStates

SETTINGS = ControlSettings(
    api_address="ipc:///none", model="m", max_open=3, blocks_of_credit=4, tokens_deadline_s=60, reader_deadline_s=10
)
BLOCK = SETTINGS.ranks * SETTINGS.block_tokens
PEER = b"api"


class Counter:
    """A desk with a fake ZeroMQ behind it that takes, keeps waiting, or has lost the peer."""

    def __init__(self):
        self.outcome, self.sent = Sent.DONE, []
        self.desk = Desk(SETTINGS, self.send, MemoryStates())
        self.desk.set_model(RankHello(1, 1, 0, 1, 2, "h", "m", 2, 100, end_token=9))

    def send(self, peer, message):
        if self.outcome is Sent.DONE:
            self.sent.append(message)
        return self.outcome

    def tell(self, message, now=1.0, peer=PEER):
        self.desk.receive(peer, message, now)

    def tokens(self, values, *, start=0, final=False, name="a", now=1.0):
        self.tell(Tokens(name, start, np.asarray(values, dtype="<i4").tobytes(), final), now)

    def last(self, kind):
        return [message for message in self.sent if isinstance(message, kind)][-1]

    @property
    def session(self):
        (session,) = self.desk.sessions.values()
        return session


@pytest.fixture
def counter():
    """A desk without requests."""
    return Counter()


def test_an_open_request_is_accepted_with_bounded_credit(counter):
    """The API may send a few blocks ahead, and more only when blocks went to the ranks."""
    counter.tell(open_encoding("a", RowSpec()))
    assert counter.sent == [Accepted("a"), Credit("a", 4 * BLOCK)]
    counter.tokens(np.zeros(4 * BLOCK))
    counter.desk.grant(counter.session)
    assert len(counter.sent) == 2
    counter.session.dispatched = BLOCK
    counter.desk.grant(counter.session)
    assert counter.sent[2:] == [Credit("a", 5 * BLOCK)]


def test_more_requests_than_allowed_are_refused_with_a_code(counter):
    """The refusal is immediate and costs the others nothing."""
    for name in "abc":
        counter.tell(open_encoding(name, RowSpec()))
    counter.tell(open_encoding("d", RowSpec()))
    assert counter.last(Failed).code == "overloaded"
    assert len(counter.desk.sessions) == 3
    counter.tell(Cancel("a"))
    counter.tell(open_encoding("e", RowSpec()))
    assert counter.sent[-2] == Accepted("e")


def test_the_same_id_of_two_api_processes_are_two_requests(counter):
    """Ids belong to their peer, and a second open of the same one changes nothing."""
    counter.tell(open_encoding("a", RowSpec()), peer=b"one")
    counter.tell(open_encoding("a", RowSpec()), peer=b"two")
    counter.tell(open_encoding("a", RowSpec()), peer=b"two")
    assert len(counter.desk.sessions) == 2


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Tokens("a", 5, b"\0" * 4, False), "do not follow"),
        (Tokens("a", 0, b"\0" * 3, False), "whole int32"),
        (Tokens("a", 0, b"\0" * 4 * (4 * BLOCK + 1), False), "up to"),
        (Tokens("a", 0, np.array([100], dtype="<i4").tobytes(), False), "vocabulary of 100"),
        (Tokens("a", 0, np.array([-1], dtype="<i4").tobytes(), False), "token -1"),
    ],
    ids=["gap", "half a token", "over the credit", "id too large", "id negative"],
)
def test_tokens_that_do_not_fit_fail_the_request(counter, message, text):
    """They never reach a rank, and the message says what was needed."""
    counter.tell(open_encoding("a", RowSpec()))
    counter.tell(message)
    failed = counter.last(Failed)
    assert failed.code == "invalid_value"
    assert text in failed.message
    assert not counter.desk.sessions


def test_tokens_after_the_end_fail_the_request(counter):
    """`final` is final."""
    counter.tell(open_encoding("a", RowSpec()))
    counter.tokens([1], final=True)
    counter.tokens([1], start=1)
    assert "after the end" in counter.last(Failed).message


def test_tokens_that_came_before_the_model_was_known_are_checked_then():
    """A bad id is found although no rank had said hello when it arrived."""
    counter = Counter()
    counter.desk.model = None
    counter.tell(open_encoding("a", RowSpec()))
    counter.tokens([5000])
    assert counter.desk.sessions
    counter.desk.set_model(RankHello(1, 1, 0, 1, 2, "h", "m", 2, 100))
    assert counter.last(Failed).code == "invalid_value"


def test_tokens_of_an_unknown_request_are_answered(counter):
    """An API that outlived its controller hears that its request is gone."""
    counter.tokens([1], name="gone")
    assert counter.last(Failed).request_id == "gone"


def test_a_stopping_desk_ends_and_refuses_everything(counter):
    """Open requests, tokens that were on their way and new requests are all told the same reason."""
    counter.tell(open_encoding("a", RowSpec()))
    counter.desk.stop("the engine is stopping")
    counter.tokens([1, 2])
    counter.tell(open_encoding("b", RowSpec()))
    failures = [message for message in counter.sent if isinstance(message, Failed)]
    codes = (("a", "stopping"), ("a", "engine_not_ready"), ("b", "engine_not_ready"))
    assert failures == [Failed(name, code, "the engine is stopping") for name, code in codes]


def test_empty_inputs_end_at_once(counter):
    """An encoding of nothing has no rows; a completion needs a token."""
    counter.tell(open_encoding("a", RowSpec()))
    counter.tokens([], final=True)
    assert counter.sent[-1] == EncodingDone("a", 0, 0)
    counter.tell(open_completion("b", SamplingSpec(5)))
    counter.tokens([], final=True, name="b")
    assert counter.last(Failed).code == "empty_input"


def test_rows_are_sent_as_they_are_complete_and_the_end_after_the_last(counter):
    """The summary counts what was sent, also when `final` came after the last token."""
    counter.tell(open_encoding("a", RowSpec("window", 2)))
    counter.tokens([1, 2, 3])
    vectors = np.array([[2, 4], [3, 3]], dtype="<f4").tobytes()
    counter.desk.take_pieces(RowPieces(counter.session.number, [0, 2], [2, 3], vectors))
    assert counter.sent[-1] == Rows("a", 0, [0], [2], np.array([1, 2], dtype="<f4").tobytes())
    counter.tokens([], start=3, final=True)
    assert counter.sent[-2] == Rows("a", 1, [2], [3], np.array([3, 3], dtype="<f4").tobytes())
    assert counter.sent[-1] == EncodingDone("a", 3, 2)


def test_many_rows_travel_in_several_messages(counter):
    """No message grows with the size of a block."""
    counter.tell(open_encoding("a", RowSpec("token")))
    count = 100_000
    counter.session.received, counter.session.final = count, True
    pieces = RowPieces(counter.session.number, list(range(count)), list(range(1, count + 1)), bytes(8 * count))
    counter.desk.take_pieces(pieces)
    rows = [message for message in counter.sent if isinstance(message, Rows)]
    assert max(len(message.vectors) for message in rows) <= 256 << 10
    assert [message.first_row for message in rows] == np.cumsum([0, *(len(m.starts) for m in rows)])[:-1].tolist()
    assert sum(len(message.starts) for message in rows) == count


def test_a_completion_ends_by_its_length_or_by_the_end_token(counter):
    """The last token carries "length"; the end token itself is not sent."""
    counter.tell(open_completion("a", SamplingSpec(2)))
    number = counter.session.number
    counter.desk.take_draw(number, 5)
    counter.desk.take_draw(number, 6)
    assert counter.sent[-2:] == [Generated("a", [5]), Generated("a", [6], "length")]
    counter.desk.take_draw(number, 7)
    assert counter.sent[-1] == Generated("a", [6], "length")
    counter.tell(open_completion("b", SamplingSpec(2)))
    counter.desk.take_draw(counter.session.number, 9)
    assert counter.sent[-1] == Generated("b", [], "stop")


def test_the_end_token_is_told_of_beside_a_scored_prompt(counter):
    """Where the prompt is scored the end token's log-probabilities come too: a list of them ends with the last draw."""
    for prompt_logprobs, told in ((None, None), (0, [TokenLogprobs(-0.25)])):
        counter.tell(open_completion("a", SamplingSpec(5, logprobs=0, prompt_logprobs=prompt_logprobs)))
        counter.tokens([1, 2], final=True)
        counter.desk.take_draw(counter.session.number, 9, TokenLogprobs(-0.25))
        assert counter.last(Generated) == Generated("a", [], "stop", told)


def test_log_probabilities_travel_with_their_token(counter):
    """What a rank told about a draw reaches the API beside the token."""
    counter.tell(open_completion("a", SamplingSpec(2, logprobs=1)))
    counter.desk.take_draw(counter.session.number, 5, TokenLogprobs(-0.5, [5], [-0.5]))
    assert counter.sent[-1] == Generated("a", [5], None, [TokenLogprobs(-0.5, [5], [-0.5])])


def test_a_seed_is_settled_when_none_is_given(counter):
    """Work that is done again draws the same tokens, so the seed cannot be left to a rank."""
    counter.tell(open_completion("a", SamplingSpec(2)))
    assert counter.session.sampling.seed is not None


def test_ended_work_that_ranks_hold_is_closed_there(counter):
    """Only sessions that were opened on the ranks have to be closed on them."""
    counter.tell(open_encoding("a", RowSpec()))
    counter.tell(Cancel("a"))
    assert counter.desk.closing == []
    counter.tell(open_encoding("b", RowSpec()))
    counter.session.opened = True
    number = counter.session.number
    counter.tell(Cancel("b"))
    assert counter.desk.closing == [number]


def test_a_slow_reader_blocks_its_requests_and_gets_everything_in_order_later(counter):
    """What a full queue did not take is sent when there is room, before anything newer."""
    counter.tell(open_completion("a", SamplingSpec(9)))
    counter.outcome = Sent.FULL
    for token in (1, 2):
        counter.desk.take_draw(counter.session.number, token)
    assert counter.desk.blocked(counter.session)
    counter.outcome = Sent.DONE
    counter.desk.take_draw(counter.session.number, 3)
    assert counter.desk.blocked(counter.session)
    counter.desk.tick(2.0)
    assert not counter.desk.blocked(counter.session)
    assert [message.tokens for message in counter.sent[-3:]] == [[1], [2], [3]]


def test_a_reader_that_hangs_or_is_gone_loses_its_requests(counter):
    """Work for nobody stops: at once when the peer is gone, after a deadline when it takes nothing."""
    counter.tell(open_completion("a", SamplingSpec(9)))
    counter.outcome = Sent.FULL
    counter.desk.take_draw(counter.session.number, 1)
    counter.desk.tick(5.0)
    assert counter.desk.sessions
    counter.desk.tick(20.0)
    assert not counter.desk.sessions
    counter.outcome = Sent.DONE
    counter.tell(open_completion("b", SamplingSpec(9)), now=30.0)
    counter.outcome = Sent.GONE
    counter.desk.tick(33.0)
    assert not counter.desk.sessions


def test_a_request_whose_tokens_stop_coming_ends(counter):
    """Waiting for a client has a deadline, unless the client waits for credit."""
    counter.tell(open_encoding("a", RowSpec()))
    counter.tell(open_encoding("b", RowSpec()))
    counter.tokens(np.zeros(4 * BLOCK), name="b")
    counter.desk.tick(30.0)
    assert len(counter.desk.sessions) == 2
    counter.desk.tick(62.0)
    assert counter.session.request_id == "b"
    assert counter.last(Failed) == Failed("a", "body_timeout", counter.last(Failed).message)


def test_work_whose_deadline_has_passed_is_dropped(counter):
    """Nobody waits for it any more, so nothing of it is begun or gone on with; the client learns how far it came."""
    counter.tell(open_completion("a", SamplingSpec(5), Terms(deadline_s=2.0)), now=1.0)
    counter.tell(open_completion("b", SamplingSpec(5)), now=1.0)
    counter.desk.tick(2.9)
    assert len(counter.desk.sessions) == 2
    counter.desk.tick(3.0)
    failed = counter.last(Failed)
    assert (failed.request_id, failed.code) == ("a", "deadline_exceeded")
    assert "deadline of 2 s has passed: 0 of the 0 tokens" in failed.message
    assert counter.session.request_id == "b"


def test_too_many_tokens_that_wait_are_refused_with_a_time(counter):
    """The answer says when there may be room, by how fast the ranks have been."""
    counter.desk.pace.token_s = 1e-6
    counter.tell(open_encoding("a", RowSpec(), Terms(tokens=SETTINGS.max_waiting_tokens)))
    counter.tell(open_encoding("b", RowSpec(), Terms(tokens=5_000_000)))
    failed = counter.last(Failed)
    assert (failed.request_id, failed.code, failed.retry_after_s) == ("b", "overloaded", 5)
    assert counter.session.request_id == "a"


def test_how_far_the_input_is_read_is_told_where_it_was_asked_for(counter):
    """Once all ranks have read a block; nobody else is sent anything."""
    counter.tell(open_completion("a", SamplingSpec(5), Terms(progress=True)))
    counter.desk.progress(counter.session.number, 512)
    assert counter.sent[-1] == Progress("a", 512)
    counter.tell(Cancel("a"))
    counter.tell(open_completion("b", SamplingSpec(5)))
    counter.desk.progress(counter.session.number, 512)
    assert counter.last(Progress).request_id == "a"


def test_a_request_comes_further_only_where_it_has_not_been(counter):
    """What is read for the first time counts once; read again after a loss it does not, and what comes then does."""
    counter.tell(open_completion("a", SamplingSpec(5)))
    counter.desk.progress(counter.session.number, 512)
    assert [counter.desk.came_further(), counter.desk.came_further()] == [True, False]
    counter.session.exposed = True
    counter.desk.rewind("rank 0 is gone")
    counter.desk.progress(counter.session.number, 512)
    assert not counter.desk.came_further()
    counter.desk.progress(counter.session.number, 1024)
    assert counter.desk.came_further()


def test_a_request_whose_state_gets_further_is_not_what_kills_the_ranks(counter):
    """Losses count in a row only while no further state was saved between them; the last that is allowed ends it."""
    counter.tell(open_completion("a", SamplingSpec(5)))
    session = counter.session
    allowed = SETTINGS.losses_to_fail - 1
    for loss in range(2 * allowed + 3):
        session.exposed = True
        counter.desk.rewind("rank 0 is gone")
        session.journal.position += 512 * (loss < allowed + 3)
    assert session.losses == allowed
    session.exposed = True
    counter.desk.rewind("rank 0 is gone")
    assert counter.last(Failed).code == "engine_failed"

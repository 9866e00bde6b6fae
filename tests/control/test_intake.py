"""The side that faces the API: admission, credit, tokens in, answers out, readers that are slow or gone."""

import numpy as np
import pytest

from dist_attn.control.answers import Answers
from dist_attn.control.intake import Intake
from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.settings import ControlSettings
from dist_attn.control.states import States
from dist_attn.control.steps import Pace
from dist_attn.wire.messages import (
    Accepted,
    BeginState,
    Cancel,
    Credit,
    Done,
    Failed,
    Generated,
    Keep,
    OpenWork,
    Progress,
    Rows,
    RowSpec,
    SamplingSpec,
    TokenLogprobs,
    Tokens,
)
from dist_attn.wire.rank_messages import Drawn, LoadedModel, RowPieces, SavedState
from dist_attn.wire.sockets import Sent
from dist_attn.wire.specs import Terms
from tests.support.opening import open_completion, open_encoding
from tests.support.states import MemoryStates

SETTINGS = ControlSettings(
    api_address="ipc:///none", model="m", max_open=3, blocks_of_credit=4, tokens_deadline_s=60, reader_deadline_s=10
)
BLOCK = SETTINGS.ranks * SETTINGS.block_tokens
PEER = b"api"


class ApiSide:
    """What faces the API, with a fake ZeroMQ behind it that takes, keeps waiting, or has lost the peer."""

    def __init__(self, model=True):
        self.outcome, self.sent, self.pace = Sent.DONE, [], Pace()
        keeper = MemoryStates()
        self.requests = OpenRequests(SETTINGS, self.send, keeper)
        states = States(self.requests, SETTINGS, keeper)
        self.answers = Answers(self.requests, states, SETTINGS)
        self.intake = Intake(self.requests, states, self.answers, SETTINGS, self.pace)
        if model:
            self.intake.set_model(LoadedModel("m", 2, 100, (8, 9)))

    def send(self, peer, message):
        if self.outcome is Sent.DONE:
            self.sent.append(message)
        return self.outcome

    def tell(self, message, now=1.0, peer=PEER):
        self.requests.now = now
        self.intake.receive(peer, message)

    def tokens(self, values, *, start=0, final=False, name="a", now=1.0):
        self.tell(Tokens(name, start, np.asarray(values, dtype="<i4").tobytes(), final), now)

    def tick(self, now):
        self.requests.now = now
        self.intake.tick()

    def draw(self, token, logprobs=None):
        """A rank has drawn a token for the open request."""
        self.answers.take_draw(Drawn(self.request.number, token, logprobs))

    def read(self, tokens):
        """A block of so many tokens goes to the ranks."""
        self.request.reading.take(tokens)
        self.request.reading.end_block(tokens)

    def lose(self):
        """The ranks are lost while they work on the open request."""
        self.request.open(1.0)
        self.answers.rewind("rank 0 is gone")

    def last(self, kind):
        return [message for message in self.sent if isinstance(message, kind)][-1]

    @property
    def request(self):
        (request,) = self.requests
        return request


@pytest.fixture
def side():
    """The API's side without requests."""
    return ApiSide()


def test_an_open_request_is_accepted_with_bounded_credit(side):
    """The API may send a few blocks ahead, and more only when blocks went to the ranks."""
    side.tell(open_encoding("a", RowSpec()))
    assert side.sent == [Accepted("a"), Credit("a", 4 * BLOCK)]
    side.tokens(np.zeros(4 * BLOCK))
    side.requests.grant(side.request)
    assert len(side.sent) == 2
    side.read(BLOCK)
    side.requests.grant(side.request)
    assert side.sent[2:] == [Credit("a", 5 * BLOCK)]


def test_more_requests_than_allowed_are_refused_with_a_code(side):
    """The refusal is immediate and costs the others nothing."""
    for name in "abc":
        side.tell(open_encoding(name, RowSpec()))
    side.tell(open_encoding("d", RowSpec()))
    assert side.last(Failed).code == "overloaded"
    assert len(side.requests) == 3
    side.tell(Cancel("a"))
    side.tell(open_encoding("e", RowSpec()))
    assert side.sent[-2] == Accepted("e")


def test_the_same_id_of_two_api_processes_are_two_requests(side):
    """Ids belong to their peer, and a second open of the same one changes nothing."""
    side.tell(open_encoding("a", RowSpec()), peer=b"one")
    side.tell(open_encoding("a", RowSpec()), peer=b"two")
    side.tell(open_encoding("a", RowSpec()), peer=b"two")
    assert len(side.requests) == 2


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (OpenWork("a"), "either the rows of an encoding or"),
        (OpenWork("a", rows=RowSpec(), draw=SamplingSpec(1)), "either the rows of an encoding or"),
        (OpenWork("a", draw=SamplingSpec(1), keep=Keep(512)), "kept of sessions only"),
        (OpenWork("a", rows=RowSpec(), keep=Keep(at=(512,))), "begins with no stored state and keeps none"),
        (OpenWork("a", BeginState(512, "", "", 9), RowSpec()), "begins with no stored state and keeps none"),
        (OpenWork("a", keep=Keep(at=(512,), end=True)), "of a prompt are kept of completions only"),
    ],
)
def test_work_that_no_engine_does_is_refused(side, work, text):
    """What would be half done is refused in words before it is open."""
    side.tell(work)
    (failed,) = side.sent
    assert (failed.request_id, failed.code) == ("a", "invalid_value") and text in failed.message
    assert not len(side.requests)


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
def test_tokens_that_do_not_fit_fail_the_request(side, message, text):
    """They never reach a rank, and the message says what was needed."""
    side.tell(open_encoding("a", RowSpec()))
    side.tell(message)
    failed = side.last(Failed)
    assert failed.code == "invalid_value"
    assert text in failed.message
    assert not len(side.requests)


def test_tokens_after_the_end_fail_the_request(side):
    """`final` is final."""
    side.tell(open_encoding("a", RowSpec()))
    side.tokens([1], final=True)
    side.tokens([1], start=1)
    assert "after the end" in side.last(Failed).message


def test_tokens_that_came_before_the_model_was_known_are_checked_then():
    """A bad id is found although no rank had said hello when it arrived."""
    side = ApiSide(model=False)
    side.tell(open_encoding("a", RowSpec()))
    side.tokens([5000])
    assert len(side.requests)
    side.intake.set_model(LoadedModel("m", 2, 100))
    assert side.last(Failed).code == "invalid_value"


def test_a_text_beyond_the_learned_positions_is_refused(side):
    """Of a completion all but the last drawn token are fed, of an encoding all; what fits is taken."""
    side.intake.set_model(LoadedModel("m", 2, 100, positions=16))
    side.tell(open_encoding("a", RowSpec()))
    side.tokens(np.zeros(16))
    side.tell(open_completion("b", SamplingSpec(7)))
    side.tokens(np.zeros(10), name="b", final=True)
    assert len(side.requests) == 2
    side.tokens([0], start=16)
    assert side.last(Failed).request_id == "a" and side.last(Failed).code == "context_length_exceeded"
    side.tell(open_completion("c", SamplingSpec(8)))
    side.tokens(np.zeros(10), name="c", final=True)
    assert side.last(Failed).request_id == "c"
    assert "has 17 tokens, and this model has learned positions for 16" in side.last(Failed).message


def test_tokens_of_an_unknown_request_are_answered(side):
    """An API that outlived its controller hears that its request is gone."""
    side.tokens([1], name="gone")
    assert side.last(Failed).request_id == "gone"


def test_a_stopping_engine_ends_and_refuses_everything(side):
    """Open requests, tokens that were on their way and new requests are all told the same reason."""
    side.tell(open_encoding("a", RowSpec()))
    side.intake.stop("the engine is stopping")
    side.tokens([1, 2])
    side.tell(open_encoding("b", RowSpec()))
    failures = [message for message in side.sent if isinstance(message, Failed)]
    codes = (("a", "stopping"), ("a", "engine_not_ready"), ("b", "engine_not_ready"))
    assert failures == [Failed(name, code, "the engine is stopping") for name, code in codes]


def test_empty_inputs_end_at_once(side):
    """An encoding of nothing has no rows; a completion needs a token."""
    side.tell(open_encoding("a", RowSpec()))
    side.tokens([], final=True)
    assert side.sent[-1] == Done("a", 0, 0, 0)
    side.tell(open_completion("b", SamplingSpec(5)))
    side.tokens([], final=True, name="b")
    assert side.last(Failed).code == "empty_input"


def test_rows_are_sent_as_they_are_complete_and_the_end_after_the_last(side):
    """The summary counts what was sent, also when `final` came after the last token."""
    side.tell(open_encoding("a", RowSpec("window", 2)))
    side.tokens([1, 2, 3])
    vectors = np.array([[2, 4], [3, 3]], dtype="<f4").tobytes()
    side.answers.take_pieces(RowPieces(side.request.number, [0, 2], [2, 3], vectors))
    assert side.sent[-1] == Rows("a", 0, [0], [2], np.array([1, 2], dtype="<f4").tobytes())
    side.tokens([], start=3, final=True)
    assert side.sent[-2] == Rows("a", 1, [2], [3], np.array([3, 3], dtype="<f4").tobytes())
    assert side.sent[-1] == Done("a", 3, 0, 2)


def test_many_rows_travel_in_several_messages(side):
    """No message grows with the size of a block."""
    side.tell(open_encoding("a", RowSpec("token")))
    count = 100_000
    side.request.reading.grant(count, 1.0)
    side.tokens(np.zeros(count), final=True)
    pieces = RowPieces(side.request.number, list(range(count)), list(range(1, count + 1)), bytes(8 * count))
    side.answers.take_pieces(pieces)
    rows = [message for message in side.sent if isinstance(message, Rows)]
    assert max(len(message.vectors) for message in rows) <= 256 << 10
    assert [message.first_row for message in rows] == np.cumsum([0, *(len(m.starts) for m in rows)])[:-1].tolist()
    assert sum(len(message.starts) for message in rows) == count


def test_a_completion_ends_by_its_length_or_by_the_end_token(side):
    """The last token carries "length"; the end token itself is not sent."""
    side.tell(open_completion("a", SamplingSpec(2)))
    number = side.request.number
    side.draw(5)
    side.draw(6)
    assert side.sent[-2:] == [Generated("a", [5]), Generated("a", [6], "length")]
    side.answers.take_draw(Drawn(number, 7))
    assert side.sent[-1] == Generated("a", [6], "length")
    side.tell(open_completion("b", SamplingSpec(2)))
    side.draw(9)
    assert side.sent[-1] == Generated("b", [], "stop")


def test_the_end_token_is_told_of_beside_a_scored_prompt(side):
    """Where the prompt is scored the end token's log-probabilities come too: a list of them ends with the last draw."""
    for prompt_logprobs, told in ((None, None), (0, [TokenLogprobs(-0.25)])):
        side.tell(open_completion("a", SamplingSpec(5, logprobs=0, prompt_logprobs=prompt_logprobs)))
        side.tokens([1, 2], final=True)
        side.draw(9, TokenLogprobs(-0.25))
        assert side.last(Generated) == Generated("a", [], "stop", told, told and 9)


def test_log_probabilities_travel_with_their_token(side):
    """What a rank told about a draw reaches the API beside the token."""
    side.tell(open_completion("a", SamplingSpec(2, logprobs=1)))
    side.draw(5, TokenLogprobs(-0.5, [5], [-0.5]))
    assert side.sent[-1] == Generated("a", [5], None, [TokenLogprobs(-0.5, [5], [-0.5])])


def test_a_seed_is_settled_when_none_is_given(side):
    """Work that is done again draws the same tokens, so the seed cannot be left to a rank."""
    side.tell(open_completion("a", SamplingSpec(2)))
    assert side.request.work.draw.seed is not None


def test_ended_work_that_ranks_hold_is_closed_there(side):
    """Only sessions that were opened on the ranks have to be closed on them."""
    side.tell(open_encoding("a", RowSpec()))
    side.tell(Cancel("a"))
    assert not side.requests.any_to_close
    side.tell(open_encoding("b", RowSpec()))
    side.request.open(1.0)
    number = side.request.number
    side.tell(Cancel("b"))
    assert side.requests.take_closed() == [number]


def test_a_slow_reader_blocks_its_requests_and_gets_everything_in_order_later(side):
    """What a full queue did not take is sent when there is room, before anything newer."""
    side.tell(open_completion("a", SamplingSpec(9)))
    side.outcome = Sent.FULL
    for token in (1, 2):
        side.draw(token)
    assert side.requests.blocked(side.request)
    side.outcome = Sent.DONE
    side.draw(3)
    assert side.requests.blocked(side.request)
    side.tick(2.0)
    assert not side.requests.blocked(side.request)
    assert [message.tokens for message in side.sent[-3:]] == [[1], [2], [3]]


def test_a_reader_that_hangs_or_is_gone_loses_its_requests(side):
    """Work for nobody stops: at once when the peer is gone, after a deadline when it takes nothing."""
    side.tell(open_completion("a", SamplingSpec(9)))
    side.outcome = Sent.FULL
    side.draw(1)
    side.tick(5.0)
    assert len(side.requests)
    side.tick(20.0)
    assert not len(side.requests)
    side.outcome = Sent.DONE
    side.tell(open_completion("b", SamplingSpec(9)), now=30.0)
    side.outcome = Sent.GONE
    side.tick(33.0)
    assert not len(side.requests)


def test_a_request_whose_tokens_stop_coming_ends(side):
    """Waiting for a client has a deadline, unless the client waits for credit."""
    side.tell(open_encoding("a", RowSpec()))
    side.tell(open_encoding("b", RowSpec()))
    side.tokens(np.zeros(4 * BLOCK), name="b")
    side.tick(30.0)
    assert len(side.requests) == 2
    side.tick(62.0)
    assert side.request.request_id == "b"
    assert side.last(Failed) == Failed("a", "body_timeout", side.last(Failed).message)


def test_work_whose_deadline_has_passed_is_dropped(side):
    """Nobody waits for it any more, so nothing of it is begun or gone on with; the client learns how far it came."""
    side.tell(open_completion("a", SamplingSpec(5), Terms(deadline_s=2.0)), now=1.0)
    side.tell(open_completion("b", SamplingSpec(5)), now=1.0)
    side.tick(2.9)
    assert len(side.requests) == 2
    side.tick(3.0)
    failed = side.last(Failed)
    assert (failed.request_id, failed.code) == ("a", "deadline_exceeded")
    assert "deadline of 2 s has passed: 0 of the 0 tokens" in failed.message
    assert side.request.request_id == "b"


def test_too_many_tokens_that_wait_are_refused_with_a_time(side):
    """The answer says when there may be room, by how fast the ranks have been."""
    side.pace.token_s = 1e-6
    side.tell(open_encoding("a", RowSpec(), Terms(tokens=SETTINGS.max_waiting_tokens)))
    side.tell(open_encoding("b", RowSpec(), Terms(tokens=5_000_000)))
    failed = side.last(Failed)
    assert (failed.request_id, failed.code, failed.retry_after_s) == ("b", "overloaded", 5)
    assert side.request.request_id == "a"


def test_how_far_the_input_is_read_is_told_where_it_was_asked_for(side):
    """Once all ranks have read a block; nobody else is sent anything."""
    side.tell(open_completion("a", SamplingSpec(5), Terms(progress=True)))
    side.answers.progress(side.request.number, 512)
    assert side.sent[-1] == Progress("a", 512)
    side.tell(Cancel("a"))
    side.tell(open_completion("b", SamplingSpec(5)))
    side.answers.progress(side.request.number, 512)
    assert side.last(Progress).request_id == "a"


def test_a_request_comes_further_only_where_it_has_not_been(side):
    """What is read for the first time counts once; read again after a loss it does not, and what comes then does."""
    side.tell(open_completion("a", SamplingSpec(5)))
    side.answers.progress(side.request.number, 512)
    assert [side.answers.came_further(), side.answers.came_further()] == [True, False]
    side.lose()
    side.answers.progress(side.request.number, 512)
    assert not side.answers.came_further()
    side.answers.progress(side.request.number, 1024)
    assert side.answers.came_further()


def test_a_request_whose_state_gets_further_is_not_what_kills_the_ranks(side):
    """Losses count in a row only while no further state was saved between them; the last that is allowed ends it."""
    side.tell(open_completion("a", SamplingSpec(5)))
    losses, reading = side.request.losses, side.request.reading
    side.tokens(np.zeros(4 * BLOCK))
    allowed = SETTINGS.losses_to_fail - 1
    for loss in range(2 * allowed + 3):
        side.lose()
        if loss < allowed + 3:
            side.read(512)
            reading.commit(SavedState(1, reading.dispatched, 0, 0))
    assert losses.count == allowed
    side.lose()
    assert side.last(Failed).code == "engine_failed"

"""The controller's decisions without processes: what goes to which rank, and what is dropped."""

from itertools import pairwise

import numpy as np
import pytest

from dist_attn.control.controller import Controller
from dist_attn.control.settings import ControlSettings
from dist_attn.shipped.downloaded import LoadedSizes
from dist_attn.wire.agent_messages import (
    AgentHello,
    KillGroup,
)
from dist_attn.wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Failed,
    Generated,
    RowSpec,
    SamplingSpec,
    Tokens,
)
from dist_attn.wire.rank_messages import (
    CloseOp,
    DecodeEntry,
    DecodeOp,
    Drawn,
    Draws,
    GuardCounts,
    Heartbeat,
    LoadedModel,
    OpenOp,
    Ping,
    PrefillOp,
    RankFailed,
    RankHello,
    RequestFault,
    RowPieces,
    SaveOp,
    Shutdown,
    Step,
    StepDone,
)
from dist_attn.wire.sockets import Sent, beat_identity, rank_identity
from dist_attn.wire.specs import tokens_with_room
from tests.support.opening import open_completion, open_encoding
from tests.support.snapshots import manifest
from tests.support.states import MemoryStates

SETTINGS = ControlSettings(api_address="ipc:///none", model="m", ranks=2, block_tokens=512)
API = b"api"


class Table:
    """A controller with two ranks that are ready, and everything it has sent."""

    def __init__(self, state_bytes=None, token_bytes=0, settings=SETTINGS, described=None, chunk_tokens=None):
        self.to_peers, self.steps, self.others = [], {0: [], 1: []}, []
        self.gone = set()
        self.controller = Controller(settings, self.to_api, self.to_engine, MemoryStates())
        self.now = 1.0
        self.engine(b"agent", AgentHello(PROTOCOL_VERSION, 5, "h", "127.0.0.1"))
        self.controller.tick(self.now)
        model = LoadedModel(
            "m", 2, 9000, (9,), None, state_bytes, described, token_bytes, pauses=12, chunk_tokens=chunk_tokens
        )
        for rank in (0, 1):
            self.engine(
                rank_identity(1, rank),
                RankHello(PROTOCOL_VERSION, 1, rank, 2, 70 + rank, model),
            )

    def to_api(self, peer, message):
        self.to_peers.append(message)
        return Sent.GONE if peer in self.gone else Sent.DONE

    def to_engine(self, identity, message):
        if isinstance(message, Step):
            self.steps[int(identity.decode()[-1])].append(message)
        else:
            self.others.append((identity, message))
        return Sent.DONE

    def engine(self, identity, message):
        self.controller.on_engine(identity, message, self.now)

    def api(self, message):
        self.controller.on_api(API, message, self.now)

    def feed(self, name, count, *, final=True):
        self.api(Tokens(name, 0, np.arange(count, dtype="<i4").tobytes(), final))

    def turn(self, seconds=0.1):
        """Let a little time pass."""
        self.now += seconds
        self.controller.tick(self.now)

    def last_credit(self):
        """Up to where the API may send the tokens of its last request."""
        return [message.upto for message in self.to_peers if isinstance(message, Credit)][-1]

    def done(self, rank, k, epoch=1, **results):
        """A rank finishes a step."""
        message = StepDone(epoch, k, rank, 0.1, results.get("pieces", []), results.get("drawn", []))
        self.engine(rank_identity(epoch, rank), message)

    def decodes(self, rank):
        """All rounds of decoding that a rank was asked for so far."""
        rounds = [op for step in self.steps[rank] for op in step.rounds]
        return [op for op in self.ops(rank) if isinstance(op, DecodeOp)] + rounds

    def ops(self, rank):
        """All operations that a rank was sent so far."""
        return [op for step in self.steps[rank] for op in step.ops]


@pytest.fixture
def table():
    """A controller without requests."""
    return Table()


def test_every_rank_gets_every_step_and_the_same_collective_operations(table):
    """Steps are numbered without a gap, and blocks stand in the same order on all ranks with each rank's own slice."""
    table.api(open_encoding("a", RowSpec()))
    table.feed("a", 1500)
    table.turn()
    assert [step.k for step in table.steps[0]] == [step.k for step in table.steps[1]] == [1, 2]
    blocks = [[op for op in table.ops(rank) if isinstance(op, PrefillOp)] for rank in (0, 1)]
    assert [(b.start, b.lengths) for b in blocks[0]] == [(b.start, b.lengths) for b in blocks[1]]
    assert [b.lengths for b in blocks[0]] == [[512, 512], [476, 0]]
    sent = np.concatenate([np.frombuffer(b.tokens, "<i4") for pair in zip(*blocks, strict=True) for b in pair])
    assert sent.tolist() == list(range(1500))
    assert all(isinstance(table.ops(rank)[0], OpenOp) for rank in (0, 1))
    assert all(table.ops(rank)[-1] == CloseOp(1) for rank in (0, 1))


@pytest.mark.parametrize(("open_requests", "seconds"), [(1, 0.5), (4, 2.0)])
def test_a_state_is_saved_as_time_goes_by(open_requests, seconds):
    """A text that is read slowly is saved twice a second, less often where all requests' states are many bytes."""
    table = Table(state_bytes=8 << 20)
    for number in range(open_requests):
        table.api(open_encoding(str(number), RowSpec()))
    asked, k, fed = [], 0, 0
    while table.now < 10.0:
        table.api(Tokens("0", fed, bytes(4 * 1024), False))
        fed += 1024
        table.turn(0.25)
        while k < table.steps[0][-1].k:
            k += 1
            for rank in (0, 1):
                table.done(rank, k)
        asked += [table.now] * sum(isinstance(op, SaveOp) for rank in (0, 1) for op in table.steps[rank][-1].ops)
    gaps = [after - before for before, after in pairwise(dict.fromkeys(asked))]
    assert len(gaps) >= 2
    assert all(seconds <= gap <= seconds + 0.5 for gap in gaps)


def read_in_turns(table, name, seconds):
    """Feed a text as fast as it is read, block after block; where its state was asked for, and when."""
    asked, k, fed, until = [], 0, 0, table.now + seconds
    while table.now < until:
        table.api(Tokens(name, fed, bytes(4 * 1024), False))
        fed += 1024
        table.turn(0.25)
        newest = [table.steps[rank][-1] for rank in (0, 1) if table.steps[rank]]
        while newest and k < newest[0].k:
            k += 1
            for rank in (0, 1):
                table.done(rank, k)
        asked += [(fed, table.now)] * sum(isinstance(op, SaveOp) for step in newest for op in step.ops)
    return list(dict.fromkeys(asked))


def test_states_that_grow_are_saved_ever_less_often():
    """A prompt whose state gets longer with it is saved at twice the length each time, where it is read faster than it
    can be saved; an encoding's is not, as its keys lie on all ranks.
    """
    table = Table(state_bytes=100, token_bytes=16 << 10)
    table.api(open_completion("a", SamplingSpec(5)))
    asked = [fed for fed, _ in read_in_turns(table, "a", 40.0)]
    assert 3 <= len(asked) <= 7
    assert all(after >= 2 * before - 2048 for before, after in pairwise(asked))
    other = Table(state_bytes=100, token_bytes=16 << 10)
    other.api(open_encoding("a", RowSpec()))
    assert read_in_turns(other, "a", 10.0) == []


def test_a_state_that_would_not_fit_is_refused():
    """A text is refused with its length, its bytes, as `plan` says them, and the limit, whatever else is drawn."""
    described = manifest(vocab_size=9000, hidden_size=2, decode_slots=8)
    planned = [LoadedSizes(state_bytes=100, token_bytes=10).state_bytes_at(tokens_with_room(n)) for n in (110, 111)]
    assert planned == [100 + 10 * (110 + 64), 100 + 10 * (111 + 64)]
    limit = planned[0]
    table = Table(state_bytes=100, token_bytes=10, settings=SETTINGS.replace(state_bytes=limit), described=described)
    table.api(open_completion("fits", SamplingSpec(10)))
    table.feed("fits", 100)
    table.api(open_completion("long", SamplingSpec(11)))
    table.feed("long", 100)
    failed = [message for message in table.to_peers if isinstance(message, Failed)]
    assert [(message.request_id, message.code) for message in failed] == [("long", "context_length_exceeded")]
    assert "111 tokens" in failed[0].message
    assert f"{planned[1]} bytes" in failed[0].message and f"engine is {limit} " in failed[0].message
    table.api(open_encoding("apart", RowSpec()))
    table.feed("apart", 340)
    assert len([message for message in table.to_peers if isinstance(message, Failed)]) == 1


def test_an_api_process_that_dies_while_a_step_is_made_ends_its_requests_alone(table):
    """It is gone when its first request is given credit: its others of the same step end too, the rest goes on."""
    table.api(open_encoding("of another", RowSpec()))
    table.feed("of another", 4000)
    for name in ("a", "b"):
        table.controller.on_api(b"mortal", open_encoding(name, RowSpec()), table.now)
    table.gone.add(b"mortal")
    for name in ("a", "b"):
        tokens = np.arange(4000, dtype="<i4").tobytes()
        table.controller.on_api(b"mortal", Tokens(name, 0, tokens, False), table.now)
    for k in range(1, 8):
        table.turn()
        for rank in (0, 1):
            if k <= len(table.steps[rank]):
                table.done(rank, k)
    prefilled = [op for op in table.ops(0) if isinstance(op, PrefillOp)]
    assert sum(sum(op.lengths) for op in prefilled if op.request == 1) == 4000
    assert table.controller.status(table.now).active <= 1


def test_no_more_steps_are_under_way_than_allowed(table):
    """A step follows when one is finished by all ranks, not by some."""
    table.api(open_encoding("a", RowSpec("token")))
    table.feed("a", 4096)
    table.turn()
    assert len(table.steps[0]) == SETTINGS.steps_in_flight
    table.done(0, 1)
    table.turn()
    assert len(table.steps[0]) == SETTINGS.steps_in_flight
    table.done(1, 1)
    table.turn()
    assert len(table.steps[0]) == SETTINGS.steps_in_flight + 1


@pytest.mark.parametrize(("of_device", "set_to", "want"), [(4096, 0, 4096), (4096, 1024, 1024), (None, 0, 512)])
def test_blocks_are_as_long_as_the_ranks_want(of_device, set_to, want):
    """Ranks tell what a block of their device is, unless it is set; credit is enough for a block of any length."""
    table = Table(settings=SETTINGS.replace(chunk_tokens=set_to), chunk_tokens=of_device)
    table.api(open_encoding("a", RowSpec("document")))
    credit = table.last_credit()
    assert credit >= 2 * want
    table.api(Tokens("a", 0, bytes(4 * credit), final=False))
    table.turn()
    assert table.ops(0)[-1].lengths == table.ops(1)[-1].lengths == [want, want]


def test_one_rank_keeps_a_session_that_decodes(table):
    """The owner is given the last prompt token and then nothing; the other ranks forget the request."""
    table.api(open_completion("a", SamplingSpec(3)))
    table.feed("a", 4)
    table.turn()
    assert table.ops(0)[-1] == DecodeOp([DecodeEntry(1, 3)])
    assert table.ops(1)[-1] == CloseOp(1)
    for rank in (0, 1):
        table.done(rank, 1)
    table.turn()
    assert table.ops(0)[-1] == DecodeOp([DecodeEntry(1)])
    table.done(0, 2, drawn=[Drawn(1, 9)])
    assert table.to_peers[-1] == Generated("a", [], "stop")
    table.done(1, 2)
    table.done(0, 3, drawn=[Drawn(1, 4)])
    table.turn()
    assert table.to_peers[-1] == Generated("a", [], "stop")
    assert table.ops(0)[-1] == CloseOp(1)


def test_no_more_tokens_are_drawn_than_asked_for(table):
    """The limit is counted when steps are sent, not when tokens come back."""
    table.api(open_completion("a", SamplingSpec(1)))
    table.feed("a", 1)
    table.turn()
    table.turn()
    assert sum(isinstance(op, DecodeOp) for op in table.ops(0)) == 1


def test_tokens_that_come_in_the_middle_of_a_step_go_out_at_once(table):
    """A round of decoding does not wait for the blocks of its step; one of another step ends the epoch."""
    table.api(open_completion("a", SamplingSpec(9)))
    table.feed("a", 4)
    table.turn()
    table.engine(rank_identity(1, 0), Draws(1, 1, 0, [Drawn(1, 5)]))
    assert table.to_peers[-1] == Generated("a", [5])
    table.engine(rank_identity(1, 1), Draws(1, 1, 1, [], [RequestFault(1, "NaN logits")]))
    assert table.to_peers[-1] == Failed("a", "engine_failed", "NaN logits")
    table.engine(rank_identity(1, 0), Draws(1, 2, 0, [Drawn(1, 6)]))
    assert "step 2, due was step 1" in table.controller.status(table.now).reason


def test_further_rounds_ask_for_no_more_tokens_than_wanted(table):
    """A step has further rounds once the pace is known, equally many on all ranks; who has all tokens is left out."""
    table.api(open_encoding("long", RowSpec()))
    table.feed("long", 2048, final=False)
    for name, wanted in (("a", 3), ("b", 10)):
        table.api(open_completion(name, SamplingSpec(wanted)))
        table.feed(name, 4)
    for k in range(1, 6):
        table.api(Tokens("long", 1024 * (k + 1), b"\0" * 4096, False))
        table.turn()
        for rank in (0, 1):
            seconds = {"seconds": 1.0, "decode_seconds": 0.15}
            table.engine(rank_identity(1, rank), StepDone(1, k, rank, pieces=[], drawn=[], **seconds))
    table.turn()
    assert [len(step.rounds) for step in table.steps[0]] == [len(step.rounds) for step in table.steps[1]]
    assert max(len(step.rounds) for step in table.steps[0]) > 1
    asked = [[e.request for op in table.decodes(rank) for e in op.entries] for rank in (0, 1)]
    assert sum(numbers.count(2) for numbers in asked) == 3
    assert sum(numbers.count(3) for numbers in asked) <= 10


@pytest.mark.parametrize(("seconds", "under_way"), [(0.01, 2), (0.9, 1)])
def test_long_rounds_of_decoding_are_sent_one_by_one(table, seconds, under_way):
    """What comes waits for what is under way: short steps lie ready before others end, one that is long does not."""
    table.api(open_completion("a", SamplingSpec(90)))
    table.feed("a", 1)
    table.turn()
    for k in range(1, 4):
        for rank in (0, 1):
            drawn = [Drawn(1, 5)] if rank == 0 else []
            done = StepDone(1, k, rank, seconds, [], drawn, decode_seconds=seconds)
            table.engine(rank_identity(1, rank), done)
        table.turn()
    assert table.steps[0][-1].k == 3 + under_way


def test_a_cancelled_request_is_closed_on_all_ranks(table):
    """The close goes out with the next step, even if there is no other work."""
    table.api(open_encoding("a", RowSpec()))
    table.feed("a", 1200, final=False)
    table.turn()
    table.api(Cancel("a"))
    table.turn()
    assert all(table.ops(rank)[-1] == CloseOp(1) for rank in (0, 1))


def test_a_session_fault_fails_its_request_alone(table):
    """The error of one request reaches its client, and the epoch goes on."""
    table.api(open_completion("a", SamplingSpec(3)))
    table.feed("a", 1)
    table.turn()
    message = StepDone(1, 1, 0, 0.1, [], [], [RequestFault(1, "NaN logits")])
    table.engine(rank_identity(1, 0), message)
    assert table.to_peers[-1] == Failed("a", "engine_failed", "NaN logits")
    assert table.controller.status(table.now).ready


def test_guarded_denominators_of_all_ranks_add_up(table):
    """Counts of ranks and steps are summed by layer and head, and stay when the ranks are lost."""
    assert table.controller.status(table.now).guards is None
    table.api(open_encoding("a", RowSpec()))
    table.feed("a", 1500)
    table.turn()
    for rank, k, guards in ((0, 1, GuardCounts(9, [[1, 2], []])), (1, 1, None), (0, 2, GuardCounts(7, [[0, 1], [4]]))):
        table.engine(rank_identity(1, rank), StepDone(1, k, rank, 0.1, [], [], [], guards))
    assert table.controller.status(table.now).guards == GuardCounts(16, [[1, 3], [4]])
    table.engine(rank_identity(1, 0), RankFailed(1, 0, 3, "gone"))
    assert table.controller.status(table.now).guards == GuardCounts(16, [[1, 3], [4]])


@pytest.mark.parametrize(("rank", "k"), [(0, 2), (0, 0), (1, 7)])
def test_a_step_that_is_not_due_ends_the_epoch(table, rank, k):
    """A rank that lost count is not trusted with anybody's state."""
    table.api(open_encoding("a", RowSpec()))
    table.feed("a", 600)
    table.turn()
    table.done(rank, k)
    assert not table.controller.status(table.now).ready
    assert f"rank {rank}: finished step {k}, due was step 1" in table.controller.status(table.now).reason
    assert table.others[-1] == (b"agent", KillGroup(1, ""))
    status = table.controller.status(table.now)
    assert (status.lost_groups, status.replayed_tokens, status.queued) == (1, 600, 1)


def test_what_an_old_epoch_says_is_dropped(table):
    """Replies, hellos and heartbeats of ranks that are not of this epoch change nothing and are not answered."""
    before = len(table.others)
    table.engine(beat_identity(0, 0), Heartbeat(0, 0, 5, "idle"))
    table.engine(rank_identity(0, 0), StepDone(0, 1, 0, 0.1, [], []))
    table.engine(rank_identity(1, 1), StepDone(1, 1, 0, 0.1, [], []))
    table.engine(rank_identity(1, 7), StepDone(1, 1, 7, 0.1, [], []))
    assert len(table.others) == before
    assert table.controller.status(table.now).ready
    table.engine(beat_identity(1, 0), Heartbeat(1, 0, 0, "idle"))
    assert table.others[-1] == (beat_identity(1, 0), Ping())


def test_pieces_that_do_not_fit_end_the_epoch(table):
    """A rank that sends impossible rows is not believed any further."""
    table.api(open_encoding("a", RowSpec()))
    table.feed("a", 600)
    table.turn()
    table.done(0, 1, pieces=[RowPieces(1, [0], [512], b"\0" * 4)])
    assert "rank 0" in table.controller.status(table.now).reason


def test_stopping_tells_clients_and_ranks(table):
    """Open requests fail with a reason, ranks are asked to end, and no step follows."""
    table.api(open_encoding("a", RowSpec()))
    table.controller.stop(table.now)
    assert table.to_peers[-1].code == "stopping"
    assert [message for _, message in table.others[-2:]] == [Shutdown(1), Shutdown(1)]
    assert not table.controller.stopped

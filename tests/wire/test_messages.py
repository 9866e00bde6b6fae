"""The messages between processes: they survive the trip, and whatever arrives instead is refused in one way."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import WireError
from dist_attn.wire import agent_messages as agents
from dist_attn.wire import messages as wire
from dist_attn.wire import rank_messages as ranks
from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.messages import (
    AnyMessage,
    BeginState,
    Checkpoint,
    Done,
    FinishDrawing,
    Keep,
    Restored,
    decode,
    encode,
)
from dist_attn.wire.specs import Terms

KINDS = typing.get_args(AnyMessage)
FIELDS = sorted({field for kind in KINDS for field in kind.__struct_fields__})

EXAMPLES = [
    wire.OpenWork("a", rows=wire.RowSpec("token", 7, "last")),
    wire.OpenWork("a", draw=wire.SamplingSpec(9, 0.5, 3, 0.9, -4)),
    wire.OpenWork("b", draw=wire.SamplingSpec(9, presence_penalty=0.5, logit_bias={3: -1.5})),
    wire.OpenWork(
        "c", BeginState(700, "0f", "0f" * 32, 5000), wire.RowSpec(), wire.SamplingSpec(3), Keep(1024, end=True)
    ),
    FinishDrawing("c", 2),
    Restored("c", RestoreReport(700, 0, False, "ranks was 1 and is 2")),
    Checkpoint("c", 1024, 0, "0f" * 21, "0f" * 32, 5000),
    Checkpoint("c", 1024, 0, error="the store is full"),
    Done("c", 1030, 3, 4),
    wire.OpenWork("d", BeginState(512, "", "", 5000), None, wire.SamplingSpec(9), Keep(at=(1024, 1536))),
    wire.Tokens("a", 3, b"\1\0\0\0", True),
    wire.Cancel("a"),
    wire.GetStatus(),
    wire.Accepted("a"),
    wire.Credit("a", 5),
    wire.Rows("a", 2, [0, 4], [4, 8], b"\0" * 32),
    wire.Generated("a", [1, 2], "stop"),
    wire.Failed("a", "overloaded", "why"),
    wire.Failed("a", "overloaded", "why", 7),
    wire.Progress("a", 512),
    wire.OpenWork("t", rows=wire.RowSpec(), terms=Terms(0, 2.5, 700, True, "0f" * 8)),
    wire.Status(
        True,
        "",
        "m",
        4,
        9,
        "gloo",
        1,
        2,
        0,
        1,
        3.5,
        [wire.RankStatus(0, 1, "idle", 2, 0.1, 0.2, 3, 0.75)],
        ranks.GuardCounts(9, [[1, 2], []]),
    ),
    ranks.Step(1, 2, [ranks.OpenOp(1, wire.RowSpec()), ranks.PrefillOp(1, 0, [1, 0], b"\0" * 4), ranks.CloseOp(1)]),
    ranks.Step(
        1, 3, [ranks.OpenOp(2, None, wire.SamplingSpec(1), counts={7: 2}), ranks.DecodeOp([ranks.DecodeEntry(2, 5)])]
    ),
    ranks.Step(1, 4, [], [ranks.DecodeOp([ranks.DecodeEntry(2)]), ranks.DecodeOp([])]),
    ranks.StatePart(1, 0, 2, 8, b"abc"),
    ranks.Shutdown(1),
    ranks.Ping(),
    ranks.RankHello(1, 1, 0, 2, 77, ranks.LoadedModel("m", 4, 9, (3, 8))),
    ranks.Faulted(1, 2, 0, ranks.RequestFault(7, "a length that no layer takes"), 5),
    ranks.GoOn(1, 2, 7),
    ranks.Draws(1, 2, 0, [ranks.Drawn(2, 5)], [ranks.RequestFault(3, "NaN")]),
    ranks.StepDone(
        1,
        2,
        0,
        0.5,
        [ranks.RowPieces(1, [0], [1], b"\0" * 16)],
        [ranks.Drawn(2, 5)],
        [ranks.RequestFault(3, "NaN")],
        ranks.GuardCounts(4, [[0, 1]]),
    ),
    ranks.Heartbeat(1, 0, 2, "idle", 3, 4),
    ranks.RankFailed(1, 0, 2, "why"),
    agents.StartGroup(1, "e", [2, 1], 1, {"backend": "gloo"}, "a:1"),
    agents.WatchRanks(1, [77, 78]),
    agents.KillGroup(1, "e"),
    agents.StopAgent(),
    agents.AgentHello(1, 5, "name", "10.0.0.1"),
    agents.GroupStarted(1, "10.0.0.1:5"),
    agents.RankExited(1, 0),
    agents.GroupExited(1, -9, "tail"),
]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=10,
)


def decodes_or_refuses(data: bytes) -> bool:
    """Whether this is a WireError, or a message that survives another trip; anything else is raised."""
    try:
        message = decode(data)
    except WireError:
        return True
    return isinstance(message, KINDS) and encode(decode(encode(message))) == encode(message)


def test_messages_survive_the_trip():
    """Every kind of message decodes to what was encoded."""
    assert [decode(encode(message)) for message in EXAMPLES] == EXAMPLES


def test_every_kind_has_an_example():
    """No kind of message is left out of the round trip."""
    assert {type(message) for message in EXAMPLES} == set(KINDS)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_as_wire_errors(data):
    """Bytes from anywhere never raise anything but WireError."""
    assert decodes_or_refuses(data)


@given(st.sampled_from([kind.__name__ for kind in KINDS]), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8))
def test_messages_with_wrong_fields_are_refused_as_wire_errors(kind, fields):
    """A known kind with any fields of any type never raises anything but WireError."""
    assert decodes_or_refuses(msgspec.msgpack.encode({"type": kind, **fields}))


@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_messages_are_refused_as_wire_errors(message, data):
    """A real message with one byte changed, or cut short, never raises anything but WireError."""
    encoded = bytearray(encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    assert decodes_or_refuses(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,
        b"\x81\xa1a" * 50_000,
        b"\x82\xa4type\xaaWatchRanks\xa4pids\xdd\xff\xff\xff\xff\x01",
        b"\x82\xa4type\xa6Cancel\xaarequest_id\xa2\xff\xfe",
    ],
    ids=["deep lists", "deep maps", "a list that claims 4 G entries", "invalid UTF-8"],
)
def test_traps_are_refused_as_wire_errors(data):
    """Deep nesting, false lengths and broken text are refused like everything else."""
    with pytest.raises(WireError, match="unreadable"):
        decode(data)


@pytest.mark.parametrize(
    "message",
    [
        wire.OpenWork("a", rows=wire.RowSpec("verse")),
        wire.OpenWork("a", rows=wire.RowSpec("window", 0)),
        wire.OpenWork("", rows=wire.RowSpec()),
        wire.OpenWork("a", draw=wire.SamplingSpec(-1)),
        wire.OpenWork("a", draw=wire.SamplingSpec(1, float("nan"))),
        wire.Tokens("a", -1, b"", False),
        ranks.Step(1, -1, []),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(message):
    """A value that nobody could work with does not get past the decoder."""
    with pytest.raises(WireError):
        decode(encode(message))


def test_a_message_over_the_limit_is_refused_on_both_sides():
    """More than MAX_MESSAGE_BYTES is neither sent nor read, and the error names both sizes."""
    with pytest.raises(WireError, match=str(wire.MAX_MESSAGE_BYTES)):
        encode(wire.Tokens("a", 0, bytes(wire.MAX_MESSAGE_BYTES), False))
    with pytest.raises(WireError, match=str(wire.MAX_MESSAGE_BYTES)):
        decode(bytes(wire.MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("blob", ["../secret", "/etc/passwd", "00/../../x", "0" * 65, "0F"])
def test_names_of_blobs_lead_nowhere_else(blob):
    """A name that the store does not give is unreadable, so no message names any other file."""
    for message in (wire.OpenWork("a", BeginState(1, blob, "", 1)), Checkpoint("a", 1, 0, blob)):
        with pytest.raises(WireError, match="unreadable"):
            decode(encode(message))

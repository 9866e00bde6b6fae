"""Rounds of decoding between the layers of blocks: where they stand, what goes out when, and that no bit changes."""

import numpy as np
import pytest

from dist_attn.rank.worker import Decoding, ReceivedStates, perform
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import (
    CloseOp,
    DecodeEntry,
    DecodeOp,
    Drawn,
    Draws,
    LoadedModel,
    OpenOp,
    PrefillOp,
    RequestFault,
    Step,
)
from tests.rank.test_executor import executor

ROUND = DecodeOp([DecodeEntry(9)])


class _Decoder:
    """Counts its rounds."""

    def __init__(self, pauses):
        self.loaded, self.rounds = LoadedModel("m", 4, 9, pauses=pauses), 0

    def decode(self, op):
        self.rounds += 1
        return [Drawn(9, self.rounds)] if self.rounds % 3 else [RequestFault(9, "odd")]


def places(lengths, rounds, pauses, rank=0):
    """After which pause of all blocks each of the rounds stood; the draws that went out."""
    blocks = [PrefillOp(n, 0, list(of_block), b"") for n, of_block in enumerate(lengths)]
    decoder, sent, found, number = _Decoder(pauses), [], [], 0
    decoding = Decoding(Step(1, 4, blocks, [ROUND] * rounds), rank, decoder, sent.append)
    for op in blocks:
        for _ in range(pauses):
            number += 1
            before = decoder.rounds
            decoding.pause()
            found += [number] * (decoder.rounds - before)
        decoding.end_block(op)
    assert decoder.rounds == rounds == len(sent)
    return found


def test_rounds_are_spread_evenly():
    """A block of twelve parts is cut by two rounds into three equal ones, two blocks of eight by three into four."""
    assert places([(512, 512)], 2, 12) == [4, 8]
    assert places([(512, 512), (512, 512)], 3, 8) == [4, 8, 12]
    assert places([(512, 512)], 11, 12) == list(range(1, 12))
    assert places([(512,)], 0, 12) == []


def test_a_short_block_counts_by_its_tokens():
    """Of a short and a long block the long one has the rounds, and its parts are equally long."""
    assert places([(64,), (960,)], 1, 10) == [15]


@pytest.mark.parametrize("rounds", [1, 5, 12, 30])
def test_all_ranks_decode_in_the_same_places(rounds):
    """Where the rounds stand follows from what all ranks read together, not from this one's slice."""
    lengths = [(512, 0), (512, 512), (300, 0)]
    assert places(lengths, rounds, 6, rank=0) == places(lengths, rounds, 6, rank=1)


def test_what_never_pauses_decodes_after_its_blocks():
    """A model that cannot be interrupted still draws every token that was asked for."""
    block, sent = PrefillOp(1, 0, [512], b""), []
    decoding = Decoding(Step(1, 4, [block], [ROUND] * 3), 0, _Decoder(0), sent.append)
    decoding.end_block(block)
    assert [type(m) for m in sent] == [Draws] * 3
    assert (sent[0].drawn, sent[2].faults) == ([Drawn(9, 1)], [RequestFault(9, "odd")])


def test_only_what_somebody_would_wait_for_goes_out_early():
    """A step that only decodes says what it drew when it is done."""
    sent, decoding = [], Decoding(Step(1, 4, [ROUND]), 0, _Decoder(4), [].append)
    decoding.draw(ROUND)
    assert decoding.kept == ([Drawn(9, 1)], [])
    assert not sent
    assert decoding.seconds > 0


def test_bits_of_rows_and_tokens_do_not_depend_on_what_goes_between_layers():
    """Real layers: rows of a text and tokens of a prompt are equal whether they share a step or not."""
    text = (np.arange(700) * 7 % 96).astype("<i4")
    prompt = (np.arange(40) * 5 % 96).astype("<i4")

    def opened():
        made = executor()
        made.open(OpenOp(1, RowSpec("token")))
        made.open(OpenOp(2, None, SamplingSpec(20, temperature=0.8, seed=5)))
        made.prefill(PrefillOp(2, 0, [39], prompt[:39].tobytes()))
        return made

    first = DecodeOp([DecodeEntry(2, int(prompt[-1]))])
    blocks = [PrefillOp(1, 0, [512], text[:512].tobytes()), PrefillOp(1, 512, [188], text[512:].tobytes())]
    apart, together = opened(), opened()
    rows = [apart.prefill(op).vectors for op in blocks]
    tokens = [apart.decode(op)[0].token for op in [first, *[DecodeOp([DecodeEntry(2)])] * 5]]
    assert together.loaded.pauses > 1
    sent = []
    step = Step(1, 1, [first, *blocks], [DecodeOp([DecodeEntry(2)])] * 5)
    done = perform(step, 0, together, Pulse(), ReceivedStates(0), sent.append)
    assert [pieces.vectors for pieces in done.pieces] == rows
    assert [drawn.token for message in sent for drawn in message.drawn] == tokens
    assert done.guards == apart.take_guards()


def test_counts_of_a_text_that_is_drawn_are_told_when_it_ends():
    """A step that only draws does not ask a device for its counts; none is lost by the step that closes the request."""
    made, taken = executor(), []
    made.open(OpenOp(2, None, SamplingSpec(20, temperature=0.0)))
    steps = [[DecodeOp([DecodeEntry(2, 5)])], [DecodeOp([DecodeEntry(2)])], [CloseOp(2)]]
    for k, ops in enumerate(steps, start=1):
        taken.append(perform(Step(1, k, ops), 0, made, Pulse(), ReceivedStates(0), [].append).guards)
    assert taken[:2] == [None, None]
    once = executor()
    once.open(OpenOp(2, None, SamplingSpec(20, temperature=0.0)))
    once.decode(DecodeOp([DecodeEntry(2, 5)]))
    of_a_draw = once.take_guards()
    assert taken[2].denominators == 2 * of_a_draw.denominators > 0

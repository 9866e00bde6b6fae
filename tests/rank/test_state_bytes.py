"""States as bytes: a rank that goes on from them gives the same bits as one that never stopped."""

from collections import Counter

import numpy as np
import pytest
import torch

from dist_attn.comm.local import LocalCommunicator
from dist_attn.control.scheduler import split
from dist_attn.errors import WireError
from dist_attn.rank.executor import ModelExecutor
from dist_attn.rank.state_bytes import read_state, state_size, write_state
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, OpenOp, PrefillOp
from tests.support.models import small_config, small_model

KINDS = {
    "rfa": {},
    "rfa_gate": {},
    "scaleformer": {"mixer": {"kind": "scaleformer", "hidden_size": 16, "num_heads": 2, "reach": 5}},
    "s4d": {"mixer": {"kind": "s4d", "hidden_size": 16, "state_size": 6}},
}
TOKENS = np.random.default_rng(1).integers(0, 250, 3000).astype("<i4")


def executor(kind="rfa_gate"):
    """An executor of a small model, the same one each time."""
    return ModelExecutor(
        small_model(small_config(kind, **KINDS.get(kind, {}))), LocalCommunicator(), name="small", end_token=256
    )


def prefill(made, start, stop, chunk=512):
    """Feed tokens [start, stop) in chunks; the vectors of their rows."""
    vectors = []
    for at in range(start, stop, chunk):
        tokens = TOKENS[at : min(stop, at + chunk)]
        pieces = made.prefill(PrefillOp(1, at, list(split(at, len(tokens), 1)), tokens.tobytes()))
        vectors.append(b"" if pieces is None else pieces.vectors)
    return b"".join(vectors)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_bit_for_bit(kind):
    """Rows after a restore in a fresh executor are those of one that read on, to the bit."""
    first, second = executor(kind), executor(kind)
    first.open(OpenOp(1, RowSpec("window", 64)))
    prefill(first, 0, 1024)
    saved, state = first.save(1)
    second.open(OpenOp(1, RowSpec("window", 64), None, saved), state)
    assert (saved.position, saved.draws, saved.num_bytes) == (1024, 0, first.state_bytes)
    assert prefill(second, 1024, 3000) == prefill(first, 1024, 3000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drawing_goes_on_bit_for_bit(kind, temperature):
    """Tokens after a restore are those that would have been drawn, random ones too; so are log-probabilities."""
    spec = SamplingSpec(60, temperature=temperature, seed=3, logprobs=2)
    first, second = executor(kind), executor(kind)
    first.open(OpenOp(1, None, spec))
    prefill(first, 0, 700)
    drawn = [first.decode(DecodeOp([DecodeEntry(1, 5)]))[0]]
    drawn += [first.decode(DecodeOp([DecodeEntry(1)]))[0] for _ in range(9)]
    saved, state = first.save(1)
    assert (saved.position, saved.draws) == (710, 10)
    second.open(OpenOp(1, None, spec, saved), state)
    token, again, on = drawn[-1].token, [], []
    for turn in range(20):
        again += second.decode(DecodeOp([DecodeEntry(1, token if turn == 0 else None)]))
        on += first.decode(DecodeOp([DecodeEntry(1)]))
    assert again == on


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_go_on_bit_for_bit(temperature):
    """A restored request that is told what was drawn before draws on as if nothing had been; untold it does not."""
    spec = SamplingSpec(
        60, temperature=temperature, seed=3, presence_penalty=0.7, frequency_penalty=0.6, logit_bias={7: 2.0, 9: -100.0}
    )
    first, second, untold = executor(), executor(), executor()
    first.open(OpenOp(1, None, spec))
    prefill(first, 0, 100)
    drawn = [first.decode(DecodeOp([DecodeEntry(1, 5)]))[0].token]
    drawn += [first.decode(DecodeOp([DecodeEntry(1)]))[0].token for _ in range(19)]
    saved, state = first.save(1)
    second.open(OpenOp(1, None, spec, saved, dict(Counter(drawn[:-1]))), state)
    untold.open(OpenOp(1, None, spec, saved), state)
    told = []
    for made in (first, second, untold):
        entries = [DecodeEntry(1, drawn[-1])] + [DecodeEntry(1)] * 29
        told.append([made.decode(DecodeOp([entry]))[0].token for entry in entries])
    assert told[1] == told[0] != told[2]


def test_a_growing_state_is_not_saved():
    """A key-value cache has no fixed size, so there is none to announce."""
    assert executor("softmax").state_bytes is None
    assert executor("rfa_gate").state_bytes == state_size(small_model(small_config("rfa_gate")))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_state_of_another_size_is_refused(change):
    """Bytes that are too few or too many are refused with both numbers."""
    model = small_model(small_config("rfa"))
    data = write_state(model.initial_state(1))
    wrong = data[:change] if change < 0 else data + b"x"
    with pytest.raises(WireError, match=f"{len(wrong)} bytes came for a state of {len(data)}"):
        read_state(wrong, model.initial_state(1))


def test_every_tensor_comes_back_as_it_was():
    """Values and types of every tensor, of floats and positions alike, survive to the bit."""
    model = small_model(small_config("rfa_gate"))
    with torch.no_grad():
        _, state = model.hidden(torch.from_numpy(TOKENS[None, :100].astype(np.int64)))
    back = read_state(write_state(state), model.initial_state(1))
    before = [t for layer in state.layers for t in layer.tensors()] + [state.position_B]
    after = [t for layer in back.layers for t in layer.tensors()] + [back.position_B]
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        assert torch.equal(old, new)

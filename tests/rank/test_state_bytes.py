"""States as bytes: a rank that goes on from them gives the same bits as one that never stopped."""

from collections import Counter

import msgspec
import numpy as np
import pytest
import torch

from dist_attn.comm.local import LocalCommunicator
from dist_attn.control.scheduler import split
from dist_attn.costs.models import LanguageModelCosts
from dist_attn.errors import WireError
from dist_attn.generation import StateShapes
from dist_attn.mixers.softmax import SoftmaxState
from dist_attn.models import ModelState
from dist_attn.ops import KeyValueCache, SoftmaxOptions, softmax_attention_streaming
from dist_attn.rank.executor import ModelExecutor
from dist_attn.rank.state_bytes import PRELUDE, read_state, write_state
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, OpenOp, PrefillOp
from tests.support.models import small_config, small_model

KINDS = {
    "rfa": {},
    "rfa_gate": {},
    "mamba": {"mixer": {"kind": "mamba", "hidden_size": 16, "state_size": 6}},
    "softmax": {},
    "hybrid": {},
}
TOKENS = np.random.default_rng(1).integers(0, 250, 3000).astype("<i4")


def executor(kind="rfa_gate"):
    """An executor of a small model, the same one each time."""
    return ModelExecutor(
        small_model(small_config(kind, **KINDS.get(kind, {}))), LocalCommunicator(), name="small", end_tokens=[256]
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
    assert (saved.position, saved.draws, saved.num_bytes) == (1024, 0, len(state))
    (header,) = PRELUDE.unpack_from(state)
    assert len(state) == PRELUDE.size + header + first.loaded.state_bytes_at(1024) - 8
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_says_of_its_states_is_what_the_configuration_says(kind):
    """Bytes before any token, and those that each token adds, are those of a plan, and 8 for the position."""
    made = executor(kind)
    costs = LanguageModelCosts(small_config(kind, **KINDS.get(kind, {})))
    for position in (0, 1, 1000):
        assert made.loaded.state_bytes_at(position) == costs.state_bytes(position) + 8


def described(kind):
    """A model's shapes, and the state after 100 tokens."""
    model = small_model(small_config(kind, **KINDS.get(kind, {})))
    with torch.no_grad():
        return StateShapes.of(model), model.hidden(torch.from_numpy(TOKENS[None, :100].astype(np.int64)))[1]


@pytest.mark.parametrize("kind", ["rfa", "hybrid"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_state_of_another_size_is_refused(kind, change):
    """Bytes that are too few or too many are refused with both numbers."""
    shapes, state = described(kind)
    data = write_state(state)
    wrong = data[:change] if change < 0 else data + b"x"
    with pytest.raises(WireError, match=f"{len(wrong)} bytes came for a state of {len(data)}"):
        read_state(wrong, shapes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header.__setitem__(0, 99), r"tensor layers\.1\.0 is .*\[2, 100, 8\]; .*\[2, 99, 8\]"),
        (lambda header: header[1][1][0].__setitem__(1, 99), "bytes came for a state of"),
        (lambda header: header[1][1][0].__setitem__(1, 1 << 40), str(1 << 40)),
        (lambda header: header[1][1][0].__setitem__(1, -1), "unreadable"),
        (lambda header: header[1][0][0].__setitem__(0, 7), "layers.0.0"),
        (lambda header: header[1][1].pop(), "tensors came"),
        (lambda header: header.append(1), "unreadable"),
    ],
)
def test_shapes_that_are_not_those_of_a_state_are_refused(change, words):
    """Lengths that are not the position's, of other tensors or of none at all, are refused before anything is made."""
    shapes, state = described("hybrid")
    data = write_state(state)
    (length,) = PRELUDE.unpack_from(data)
    header = msgspec.msgpack.decode(data[PRELUDE.size : PRELUDE.size + length])
    change(header)
    encoded = msgspec.msgpack.encode(header)
    with pytest.raises(WireError, match=words):
        read_state(PRELUDE.pack(len(encoded)) + encoded + data[PRELUDE.size + length :], shapes)


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0", b"\xff\xff\xff\xffxx", b"\2\0\0\0\xc1\xc1"])
def test_bytes_that_are_no_state_are_refused(data):
    """Neither a missing header nor one that cannot be read is taken for a state."""
    with pytest.raises(WireError, match="header"):
        read_state(data, described("rfa")[0])


@pytest.mark.parametrize("kind", ["rfa_gate", "hybrid"])
def test_every_tensor_comes_back_as_it_was(kind):
    """Values and types of every tensor, of floats and positions alike, survive to the bit."""
    shapes, state = described(kind)
    back = read_state(write_state(state), shapes)
    before = [t for layer in state.layers for t in layer.tensors()] + [state.position_B]
    after = [t for layer in back.layers for t in layer.tensors()] + [back.position_B]
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        assert torch.equal(old, new)


def windowed(tokens, window):
    """The state of one layer of softmax attention with a window, read in blocks of three tokens."""
    rng = torch.Generator().manual_seed(3)
    cache = KeyValueCache(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 6))
    for at in range(0, tokens, 3):
        q, k, v = (torch.randn(1, 2, min(3, tokens - at), size, generator=rng) for size in (4, 4, 6))
        _, cache = softmax_attention_streaming(q, k, v, cache, options=SoftmaxOptions(window=window))
    return ModelState((SoftmaxState(cache, torch.zeros(1, 0, 8), window),), torch.tensor([tokens]))


@pytest.mark.parametrize("window", [1, 2, 5, 99])
@pytest.mark.parametrize("tokens", [0, 1, 4, 11])
def test_a_cache_with_a_window_comes_back_at_its_position(window, tokens):
    """Its last window - 1 tokens come back with those before them counted; a longer or a shorter one is refused."""
    shapes, state = StateShapes(windowed(0, window), windowed(2, window)), windowed(tokens, window)
    back = read_state(write_state(state), shapes).layers[0].cache
    assert (back.tokens, back.dropped) == (tokens, max(0, tokens - window + 1))
    assert torch.equal(back.k_BGSK, state.layers[0].cache.k_BGSK)
    for other in (windowed(tokens, window + 1), windowed(tokens, max(1, window - 1))):
        if other.layers[0].cache.dropped != back.dropped:
            with pytest.raises(WireError):
                read_state(write_state(other), shapes)

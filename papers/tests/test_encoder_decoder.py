"""The encoder-decoder: over ranks with both sides cut as one likes, step by step, and searched by beams."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from dist_attn.checkpoints import load_any_model, save_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.translation.beam_search import BeamSpec, search
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import EncoderDecoder
from tests.support.closeness import assert_close
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

SIZE, VOCAB, BEGIN, END = 8, 7, 0, 1
RFA = {"attention": "rfa", "num_random": 6}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # encoder, decoder's self-attention, cross attention
    "rfa": ({"attention": "softmax"}, {"kind": "rfa_gate", "num_random": 6}, RFA),
    "elu": ({"attention": "elu"}, {"kind": "rfa", "num_random": 6}, {"attention": "elu", "value_rank": 3}),
    "performer": (
        {"attention": "performer", "num_random": 5},
        {"kind": "performer", "num_random": 6},
        {"attention": "performer", "num_random": 7},
    ),
    "efficient": ({"attention": "efficient"}, {"kind": "efficient"}, {"attention": "efficient", "value_rank": 3}),
    "scaleformer": (
        {"attention": "scaleformer", "reach": 2},
        {"kind": "scaleformer", "reach": 3},
        {"attention": "scaleformer", "reach": 2, "value_rank": 8},
    ),
    "softmax": ({"attention": "softmax"}, {"kind": "softmax"}, {"attention": "softmax"}),
    "relative": (
        {"attention": "softmax", "relative": {"reach": 2}},
        {"kind": "softmax", "relative": {"reach": 3, "values": False}},
        {"attention": "softmax", "relative": {"reach": 2, "shared": True}, "value_rank": 3},
    ),
}
CONSTANT_STATE = ("rfa", "elu", "performer", "efficient")


def _config(kind: str, **decoder: Any) -> dict[str, Any]:
    heads = {"hidden_size": SIZE, "num_heads": 2}
    encoder, mixer, cross = KINDS[kind]
    return {
        "vocab_size": VOCAB,
        "encoder": {
            "hidden_size": SIZE,
            "num_layers": 2,
            "mlp_size": 12,
            "mixer": {"kind": "bidirectional", **heads, **encoder},
            "positions": "none" if kind in ("scaleformer", "relative") else "sinusoidal",
        },
        "decoder": {
            "num_layers": 2,
            "mlp_size": 12,
            "mixer": {**heads, **mixer},
            "cross": {**heads, **cross},
            "positions": "none" if kind in ("scaleformer", "relative") else "sinusoidal",
            **decoder,
        },
    }


def _model(kind: str) -> EncoderDecoder:
    return randomised(EncoderDecoder(EncoderDecoderConfig.model_validate(_config(kind))))


def _tokens(length: int, seed: int, batch: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET, NEXT = _tokens(11, 1), _tokens(9, 2), _tokens(9, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_change_nothing(kind: str) -> None:
    """Whatever rank holds which part of source and target, loss and all gradients are those of one process."""
    memory, layout = SequenceLayout.from_lengths((0, 4, 0, 7)), SequenceLayout.from_lengths((5, 0, 3, 1))

    def share(model: EncoderDecoder, comm: Communicator | None) -> Tensor:
        if comm is None:
            return F.cross_entropy(model(SOURCE, TARGET).flatten(0, 1), NEXT.flatten())
        encoded = model.encode(SOURCE[:, slice(*memory.range(comm.rank))], ShardedSequenceOps(comm, memory))
        own = slice(*layout.range(comm.rank))
        target_ops = ShardedSequenceOps(comm, layout)
        cross_ops = ShardedSequenceOps(comm, layout, memory_layout=memory)
        logits, _ = model.decode(TARGET[:, own], encoded, target_ops, cross_ops)
        return F.cross_entropy(logits.flatten(0, 1), NEXT[:, own].flatten(), reduction="sum") / NEXT.numel()

    assert_ranks_change_nothing(lambda: _model(kind), share, layout.size)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_parallel_form(kind: str) -> None:
    """After the first three target tokens together, one step after another gives the logits of all at once."""
    model = _model(kind)
    want = model(SOURCE, TARGET)
    logits, state = model.decode(TARGET[:, :3], model.encode(SOURCE))
    assert_close(logits, want[:, :3])
    for at in range(3, 9):
        logits_BV, state = model.step(TARGET[:, at], state)
        assert_close(logits_BV, want[:, at])
    assert state.position_B.tolist() == [9, 9]


@pytest.mark.parametrize("kind", CONSTANT_STATE)
def test_every_rank_can_decode_from_the_state(kind: str) -> None:
    """With a kernel over the memory the state after a sharded pass is whole on each rank, and steps as one process."""
    memory, layout = SequenceLayout.from_lengths((4, 7)), SequenceLayout.from_lengths((1, 2))

    def body(comm: Communicator) -> Tensor:
        model = _model(kind)
        encoded = model.encode(SOURCE[:, slice(*memory.range(comm.rank))], ShardedSequenceOps(comm, memory))
        own = TARGET[:, slice(*layout.range(comm.rank))]
        cross_ops = ShardedSequenceOps(comm, layout, memory_layout=memory)
        _, state = model.decode(own, encoded, ShardedSequenceOps(comm, layout), cross_ops)
        return model.step(TARGET[:, 3], state)[0].detach()

    want = _model(kind)(SOURCE, TARGET)[:, 3]
    for logits in run_simulated(body, 2):
        assert_close(logits, want)


def test_a_spread_memory_is_not_decoded_from() -> None:
    """Softmax over a memory that lies on several ranks trains there; a step from it is refused in words."""
    layout = SequenceLayout.from_lengths((5, 6))

    def body(comm: Communicator) -> str:
        model, ops = _model("softmax"), ShardedSequenceOps(comm, layout)
        own = SOURCE[:, slice(*layout.range(comm.rank))]
        whole = ShardedSequenceOps(comm, layout, cache="whole")
        _, state = model.decode(own, model.encode(own, ops), whole, ops)
        with pytest.raises(InputError, match="spread over ranks"):
            model.step(TARGET[:, 0], state)
        return "refused"

    assert run_simulated(body, 2) == ["refused", "refused"]


def test_the_memory_of_a_kernel_does_not_grow_with_the_source() -> None:
    """What decoding keeps of a source of 11 and of 200 tokens takes the same bytes."""
    model, sizes = _model("rfa"), []
    for length in (11, 200):
        _, state = model.decode(_tokens(1, 2), model.encode(_tokens(length, 1)))
        tensors = [t for memory in state.memories for t in memory.sums.tensors()]
        sizes.append(sum(t.numel() for t in tensors + [t for layer in state.layers for t in layer.tensors()]))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", ["elu", "scaleformer"])
def test_the_target_sees_the_source_and_no_later_target(kind: str) -> None:
    """Any source token changes the logits; a target token changes those before it not by a bit."""
    model = _model(kind)
    want = model(SOURCE, TARGET)
    for at in (0, 10):
        changed = SOURCE.clone()
        changed[:, at] = (changed[:, at] + 1) % VOCAB
        assert not torch.allclose(model(changed, TARGET), want, atol=1e-9)
    changed = TARGET.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    got = model(SOURCE, changed)
    assert_close(got[:, :5], want[:, :5])
    assert not torch.allclose(got[:, 5:], want[:, 5:], atol=1e-9)


@pytest.mark.parametrize("kind", ["rfa", "scaleformer"])
def test_beams_find_what_a_naive_search_finds(kind: str) -> None:
    """A beam as wide as there are targets of two tokens finds the best of them, for both sources side by side."""
    model, spec = _model(kind), BeamSpec(VOCAB**2, 2, 0.6)
    begin = torch.full((2, 1), BEGIN)
    with torch.no_grad():
        _, state = model.decode(begin, model.encode(SOURCE))
        # The state stands behind the first token, the search feeds what comes next: here, the same token again.
        found = search(model.step, state, begin[:, 0], spec, end_tokens=[END])
        for row, hypotheses in enumerate(found):
            best = -float("inf")
            for drawn in product(range(VOCAB), repeat=2):
                taken = drawn[: drawn.index(END) + 1] if END in drawn else drawn
                target = torch.tensor([[BEGIN, BEGIN, *taken]])
                logprobs = model(SOURCE[row : row + 1], target)[0, 1:-1].log_softmax(-1)
                total = float(logprobs.gather(1, torch.tensor(taken)[:, None]).sum())
                best = max(best, total / ((5 + len(taken)) / 6) ** 0.6)
            assert hypotheses[0].score == pytest.approx(best, abs=1e-9)


def test_it_is_saved_and_loaded(tmp_path) -> None:
    """A folder gives back configuration and weights exactly."""
    model = _model("rfa").float()
    save_model(model, tmp_path / "m")
    loaded = load_any_model(tmp_path / "m")
    assert loaded.config == model.config
    assert torch.equal(loaded(SOURCE, TARGET), model(SOURCE, TARGET))


def test_unusable_inputs_are_refused() -> None:
    """Targets of another batch, widths that differ and a block whose parts do not follow each other are named."""
    model = _model("rfa")
    with pytest.raises(ShapeError, match="1 targets came with the memory of 2"):
        model.decode(TARGET[:1], model.encode(SOURCE))
    values = _config("rfa")
    values["decoder"]["cross"]["hidden_size"] = 16
    with pytest.raises(ValidationError, match="must be one"):
        EncoderDecoderConfig.model_validate(values)
    with pytest.raises(ValidationError, match="residual = sequential"):
        EncoderDecoderConfig.model_validate(_config("rfa", block={"residual": "parallel"}))

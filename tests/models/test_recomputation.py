"""Activation checkpointing: bitwise the same training on one rank and over ranks, in less memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory import TrackedMemory
from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel, LanguageModelConfig, TextClassifier, TextClassifierConfig, build_model
from dist_attn.models.blocks import recompute_layers
from dist_attn.models.dropout import use_dropout
from dist_attn.ops import LocalSequenceOps, SequenceOps, Watch, watching
from dist_attn.sharded import ShardedSequenceOps
from tests.support.models import small_config
from tests.support.over_ranks import randomised

SIZE, VOCAB = 8, 11
HEADS = {"hidden_size": SIZE, "num_heads": 2}
MIXERS = {
    "rfa_gate": {"kind": "rfa_gate", "num_random": 6},
    "softmax": {"kind": "softmax"},
}
BOTH_SIDES = {"rfa": {"attention": "rfa", "num_random": 6}}
LENGTHS = (0, 5, 1, 7)
LAYOUT = SequenceLayout.from_lengths(LENGTHS)

Share = Callable[[nn.Module, Communicator | None], Tensor]


def _tokens(length: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def _own(comm: Communicator | None) -> tuple[slice, SequenceOps]:
    if comm is None:
        return slice(None), LocalSequenceOps()
    return slice(*LAYOUT.range(comm.rank)), ShardedSequenceOps(comm, LAYOUT)


def _with_gradients(model: nn.Module, share: Share, comm: Communicator | None) -> dict[str, Tensor]:
    loss = share(model, comm)
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def _same(make: Callable[[], nn.Module], share: Share) -> bool:
    """Whether recomputation changes no bit of loss and gradients, under dropout, on one rank and on each of several."""

    def both(comm: Communicator | None) -> bool:
        model = make().train()
        use_dropout(model, 0.2, seed=0)
        want = _with_gradients(model, share, comm)
        model.zero_grad()
        assert recompute_layers(model) > 0
        got = _with_gradients(model, share, comm)
        # A rank without tokens has no gradients of its own.
        assert comm is not None or all(bool(value.any()) for value in want.values())
        return all(torch.equal(got[name], value) for name, value in want.items())

    return both(None) and all(run_simulated(both, len(LENGTHS)))


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_language_model_trains_as_without_it(mixer: str) -> None:
    """With a state carried from one segment to the next, gradient and all, loss and gradients are bitwise the same."""
    values = {"vocab_size": VOCAB, "hidden_size": SIZE, "num_layers": 2, "mlp_size": 12}
    config = LanguageModelConfig.model_validate({**values, "mixer": {**HEADS, **MIXERS[mixer]}})
    segments = _tokens(2 * LAYOUT.total).split(LAYOUT.total, dim=1)

    def share(model: nn.Module, comm: Communicator | None) -> Tensor:
        own, ops = _own(comm)
        loss, state = torch.zeros((), dtype=torch.float64), None
        for segment in segments:
            logits, state = model(segment[:, own], ops, state)
            loss = loss + F.cross_entropy(logits.flatten(0, 1), segment[:, own].flatten(), reduction="sum")
        return loss

    assert _same(lambda: randomised(build_model(config)), share)


@pytest.mark.parametrize("mixer", BOTH_SIDES)
def test_an_encoder_trains_as_without_it(mixer: str) -> None:
    """A classifier over a bidirectional mixer has bitwise the same loss and gradients."""
    own_mixer = {"kind": "bidirectional", **HEADS, **BOTH_SIDES[mixer]}
    encoder = {"hidden_size": SIZE, "num_layers": 2, "mlp_size": 12, "mixer": own_mixer}
    config = TextClassifierConfig.model_validate({"vocab_size": VOCAB, "num_classes": 3, "encoder": encoder})
    tokens = _tokens(LAYOUT.total)

    def share(model: nn.Module, comm: Communicator | None) -> Tensor:
        own, ops = _own(comm)
        return F.cross_entropy(model(tokens[:, own], ops), torch.tensor([0, 2]))

    assert _same(lambda: randomised(TextClassifier(config)), share)


def test_backward_exchanges_what_forward_did_and_then_its_own() -> None:
    """Each rank's log is forward, then layer by layer from the last: that layer's forward again, and its backward."""
    tokens = _tokens(LAYOUT.total)

    def logs(comm: Communicator) -> tuple[list[str], list[str], list[str]]:
        model = randomised(build_model(small_config(num_layers=2)))
        own, ops = _own(comm)
        orders = []
        for wanted in (False, False, True):  # the first also compares the ranks' arguments, once
            recompute_layers(model, wanted)
            comm.traffic.clear()
            loss = model(tokens[:, own], ops)[0].square().sum()
            forward = comm.traffic.order()
            loss.backward()
            orders.append((forward, comm.traffic.order()[len(forward) :]))
        (_, _), (forward, backward), (forward_again, longer) = orders
        assert forward_again == forward
        return forward, backward, longer

    for forward, backward, longer in run_simulated(logs, len(LENGTHS)):
        assert forward
        assert len(forward) % 2 == len(backward) % 2 == 0
        half, back = len(forward) // 2, len(backward) // 2
        # The two layers make the same calls.
        assert longer == forward[half:] + backward[:back] + forward[:half] + backward[back:]


def test_a_watch_counts_once() -> None:
    """A watch over forward and backward passes counts every read-out once, and the caller's watch stays in place."""
    model, tokens, watch = build_model(small_config()), _tokens(12), Watch()
    assert recompute_layers(model) == 2
    with watching(watch):
        loss = model(tokens)[0].sum()
        counted = watch.denominators
        loss.backward()
    assert counted > 0
    assert watch.denominators == counted


def test_it_can_be_taken_back_and_costs_nothing_without_gradients() -> None:
    """Without gradients a layer runs once, and `recompute_layers(model, False)` makes the model as it was."""
    model, tokens, runs = build_model(small_config()), _tokens(12), []
    for block in model.blocks:
        block.mlp_in.register_forward_hook(lambda *_: runs.append(1))
    recompute_layers(model)
    with torch.no_grad():
        model(tokens)
    assert len(runs) == 2
    model(tokens)[0].sum().backward()
    assert len(runs) == 2 + 4
    recompute_layers(model, False)
    model(tokens)[0].sum().backward()
    assert len(runs) == 2 + 4 + 2


def test_it_saves_memory() -> None:
    """The tensors that a deep model holds at the peak of a step are less than half of those without recomputation."""

    def peak(wanted: bool) -> int:
        model = LanguageModel(small_config(num_layers=8))
        recompute_layers(model, wanted)
        with TrackedMemory() as memory:
            model.hidden(_tokens(512))[0].sum().backward()
        return memory.peak

    assert peak(True) < peak(False) / 2

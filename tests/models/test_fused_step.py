"""Decode steps in one call are those of the modules, whatever of their kinds the layers are."""

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from dist_attn.mixers.narrow_layers import NarrowLayer
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState, hold_weights_as
from dist_attn.ops import Watch, watching
from dist_attn.ops.decode_step import DecodeStep, has_decode_step
from dist_attn.ops.narrow_weights import widen_rows
from dist_attn.ops.state import steps_in_place
from dist_attn.ops.watch import FiniteCheck
from tests.support.closeness import assert_close
from tests.support.models import small_model

pytestmark = pytest.mark.skipif(not has_decode_step(), reason="no C compiler, or a processor without vectors")
RFA: dict[str, Any] = {"kind": "rfa_gate", "hidden_size": 64, "num_heads": 2, "num_random": 16}
DELTA: dict[str, Any] = {"kind": "gated_delta", "hidden_size": 64, "num_heads": 4, "key_size": 16, "value_size": 32}
PLAIN = {"mlp": {"kind": "plain", "activation": "gelu_tanh", "bias": True}}
GATED = {"norm": {"kind": "rms"}, "mlp": {"kind": "gated", "activation": "silu"}}
CASES: dict[str, dict[str, Any]] = {
    "both, convolved": {
        "mixer": {"kind": "hybrid", "pattern": [RFA | {"short_convolution": 4}, DELTA]}, "block": PLAIN,
    },
    "without gates and convolution, with biases": {
        "mixer": RFA | {"kind": "rfa", "projection_bias": True}, "block": GATED, "readout": "own",
    },
    "shared keys": {"mixer": DELTA | {"key_heads": 2, "short_convolution": 2}, "block": GATED},
}  # fmt: skip


def made(case: str, **changes: Any) -> LanguageModel:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "mlp_size": 96}
    model = small_model(LanguageModelConfig.model_validate({**sizes, **CASES[case], **changes}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.4)
    return model


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of each step in one call."""
    counted, run = list[int](), DecodeStep.run

    def count(self: DecodeStep, x_ND: torch.Tensor, *args: Any) -> Any:
        counted.append(len(x_ND))
        return run(self, x_ND, *args)

    monkeypatch.setattr(DecodeStep, "run", count)
    yield counted


def by_modules(model: LanguageModel, token_B: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, ModelState]:
    with torch.inference_mode(False), torch.enable_grad():
        logits_BV, after = model.step(token_B, state)
    return logits_BV.detach(), after.detach()


def _tensors(state: ModelState) -> list[torch.Tensor]:
    return [tensor for layer in state.layers for tensor in layer.tensors()]


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_one_call_is_that_of_the_modules(case: str, weights: Any, runs: list[int]) -> None:
    """By logits, states and guarded denominators; alone, in place and as the first row a text has the same bits."""
    model = made(case)
    wide = copy.deepcopy(model)  # with the numbers that the weights stand for
    hold_weights_as(model, weights)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, NarrowLayer):
                rows = widen_rows(layer.weight, layer.scale) if layer.precision == "int8" else layer.weight.float()
                wide.get_submodule(name).get_parameter("weight").copy_(rows)
        _, state = wide.hidden(torch.arange(15).view(3, 5))
        plain, alone = state, state.select(2)
        for t in range(4):
            token_B, watches = torch.tensor([t, t + 20, t + 40]), (Watch(), Watch())
            with watching(watches[0]):
                got_BV, state = model.step(token_B, state)
            with watching(watches[1]):
                want_BV, plain = by_modules(wide, token_B, plain)
            assert watches[0].guarded == watches[1].guarded
            assert watches[0].denominators == watches[1].denominators
            assert_close(got_BV, want_BV)
            with steps_in_place():
                one_1V, alone = model.step(token_B[2:], alone)
            assert torch.equal(one_1V[0], got_BV[2])
        for own, want, one in zip(*map(_tensors, (state, plain, alone)), strict=True):
            assert_close(own, want)
            assert torch.equal(one, own[2:])
        watch = Watch()
        for watch.rows in (1, 9):  # of a batch of three
            with watching(watch):
                model.step(token_B, state)
        watch.rows = 1
        with watching(watch):  # others fill a batch up
            first_BV, after = model.step(token_B, state)
        assert torch.equal(first_BV[0], model.step(token_B, state)[0][0]) and not first_BV[1:].any()
        for kept, had in zip(_tensors(after), _tensors(state), strict=True):
            assert torch.equal(kept[1:], had[1:])
    assert runs == [3, 1] * 4 + [3] * 4


@torch.no_grad()
def test_a_step_follows_its_model(runs: list[int]) -> None:
    """Trained weights, a layer in another's place, other random vectors, and a copy have steps of their own."""
    model, token_B = made("both, convolved"), torch.tensor([3, 4])
    state = model.initial_state(2)
    before_BV, _ = model.step(token_B, state)
    copied = copy.deepcopy(model)
    model.blocks[0].get_submodule("mixer.qkv").get_parameter("weight").mul_(0.5)
    model.blocks[0].get_submodule("mixer").get_buffer("w_HDK").mul_(2)
    model.blocks[1].mlp_out = copy.deepcopy(model.blocks[0].mlp_out)
    after_BV, _ = model.step(token_B, state)
    assert runs == [2, 2] and not torch.equal(after_BV, before_BV)
    assert_close(after_BV, by_modules(model, token_B, state)[0])
    assert torch.equal(copied.step(token_B, state)[0], before_BV)
    there = weakref.ref(model)
    model.blocks[0].mlp_in.register_forward_hook(lambda _, __, y, model=model: y)
    del model
    gc.collect()
    assert there() is None


def _hooked(model: LanguageModel) -> None:
    model.blocks[0].get_submodule("mixer.out").register_forward_hook(lambda _, __, y: 2 * y)


def _hooked_with_all_others(_: LanguageModel) -> RemovableHandle:
    return torch.nn.modules.module.register_module_forward_hook(lambda _, __, y: y)


def _of_another_class(model: LanguageModel) -> None:
    class Other(torch.nn.Linear):
        pass

    model.blocks[0].mlp_in = Other(64, 96)


def _with_another_function(model: LanguageModel) -> None:
    own: Any = model.norm
    own.forward = lambda x: 2 * x


def _with_a_norm_of_no_weights(model: LanguageModel) -> None:
    model.blocks[1].mlp_norm = torch.nn.LayerNorm(64, elementwise_affine=False)


def _of_other_strides(model: LanguageModel) -> None:
    model.blocks[1].mlp_norm.weight = torch.nn.Parameter(torch.arange(128.0)[::2])


def _with_fewer_logits(model: LanguageModel) -> None:
    model.unembedding = torch.nn.Linear(64, 32, bias=False)


CHANGES = (
    _hooked, _hooked_with_all_others, _of_another_class, _with_another_function, _with_a_norm_of_no_weights,
    _of_other_strides, _with_fewer_logits, LanguageModel.double, LanguageModel.bfloat16, LanguageModel.train,
)  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_changed_model_is_asked_itself(change: Any, first: bool, runs: list[int]) -> None:
    """Before its first step or behind it: hooks, other classes, functions, sizes, strides and types of numbers."""
    model, token_B = made("both, convolved"), torch.tensor([3, 4])
    if not first:
        model.step(token_B, model.initial_state(2))
        runs.clear()
    changed = change(model)
    try:
        model.step(token_B, model.initial_state(2))
    finally:
        if isinstance(changed, RemovableHandle):
            changed.remove()
    assert not runs


@torch.no_grad()
def test_modules_are_asked_where_more_than_numbers_is_wanted(runs: list[int]) -> None:
    """Gradients, autocast, and a look at every number; without them the next step is one call."""
    model, token_B = made("both, convolved"), torch.tensor([3, 4])
    state = model.initial_state(2)
    with torch.enable_grad():
        assert model.step(token_B, state)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        model.step(token_B, state)
    with watching(Watch(FiniteCheck())):
        model.step(token_B, state)
    assert not runs
    model.step(token_B, state)
    assert runs == [2]


OTHER_MIXERS: tuple[dict[str, Any], ...] = (
    RFA | {"weighting": "norm"},
    RFA | {"rotary": {"size": 16}},
    RFA | {"feature": "arc_cosine"},
    RFA | {"shared_gate": True},
    RFA | {"denominator": {"kind": "exact"}},
    RFA | {"num_random": 12},
    DELTA | {"allow_negative": True},
    {"kind": "elu", "hidden_size": 64, "num_heads": 2},
)


@pytest.mark.parametrize("mixer", OTHER_MIXERS)
@torch.no_grad()
def test_what_the_kernel_does_not_compute_keeps_its_modules(mixer: dict[str, Any], runs: list[int]) -> None:
    """Weights of keys, positions, other features, gates, denominators, sizes and kinds."""
    model = made("both, convolved", mixer=mixer)
    model.step(torch.tensor([3]), model.initial_state(1))
    assert not runs


@torch.no_grad()
def test_a_state_of_another_kind_is_refused_as_ever(runs: list[int]) -> None:
    """The modules say what is wrong with it."""
    model, other = made("both, convolved"), made("without gates and convolution, with biases")
    with pytest.raises(Exception, match="state"):
        model.step(torch.tensor([3]), other.initial_state(1))
    assert not runs

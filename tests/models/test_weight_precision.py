"""Models whose weights are held in fewer bits: what is rounded, what it costs, and what such a model refuses."""

import copy

import pytest
import torch

from dist_attn.checkpoints import load_model, save_model
from dist_attn.comm import run_simulated
from dist_attn.costs import read_model_costs
from dist_attn.errors import ConfigError, InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers.narrow_layers import Bfloat16Linear, Int8Embedding, Int8Linear, NarrowLayer
from dist_attn.models import hold_weights_as, weight_bytes, weight_precision_of
from dist_attn.ops.narrow_weights import int8_product, widen_rows
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.model_cases import MODEL_CASES, small_model, write_config
from tests.support.models import small_model as another_model
from tests.support.models import write_small_folder

NARROW = ("bfloat16", "int8")
TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))


def widened(model, narrow):
    """`model` with the numbers that the weights of `narrow` stand for: the oracle of it."""
    wide = copy.deepcopy(model)
    with torch.no_grad():
        for name, layer in narrow.named_modules():
            if isinstance(layer, NarrowLayer):
                rows = widen_rows(layer.weight, layer.scale) if layer.precision == "int8" else layer.weight.float()
                wide.get_submodule(name).weight.copy_(rows)
    return wide


def held(case, precision):
    """A model in float32 and the same one held in fewer bits, with the report."""
    torch.manual_seed(0)
    model = small_model(case)
    narrow = copy.deepcopy(model)
    return model, narrow, hold_weights_as(narrow, precision)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("case", MODEL_CASES)
@torch.inference_mode()
def test_every_model_reads_and_writes_as_its_rounded_weights_say(case, precision):
    """Logits of a block and of steps are those of the widened weights, but for bfloat16 inputs and sums; states too."""
    model, narrow, _ = held(case, precision)
    wide = widened(model, narrow)
    want_BLV, want_state = wide(TOKENS)
    got_BLV, state = narrow(TOKENS)
    assert_close(got_BLV.bfloat16(), want_BLV.bfloat16())
    for got, want in zip(state.layers, want_state.layers, strict=True):
        for a, b in zip(got.tensors(), want.tensors(), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
    empty = narrow.initial_state(2)
    assert [t.dtype for s in empty.layers for t in s.tensors()] == [
        t.dtype for s in wide.initial_state(2).layers for t in s.tensors()
    ]
    for t in range(4):
        step_BV, empty = narrow.step(TOKENS[:, t], empty)
        assert_close(step_BV.bfloat16(), want_BLV[:, t].bfloat16())


@pytest.mark.parametrize("precision", ("float32", *NARROW))
@pytest.mark.parametrize("case", MODEL_CASES)
def test_bytes_are_those_of_the_tensors_and_of_the_formula(case, precision, tmp_path):
    """The report, the state_dict and the planner agree to the byte; counts of layers and products do too."""
    model, narrow, report = held(case, precision)
    assert report.bytes_before == weight_bytes(model)
    saved = sum(t.nbytes for t in model.state_dict().values()) - sum(t.nbytes for t in narrow.state_dict().values())
    assert report.bytes_after == weight_bytes(narrow) == report.bytes_before - saved
    assert read_model_costs(write_config(case, tmp_path), precision).weights_bytes == report.bytes_after
    narrow_layers = [layer for layer in narrow.modules() if isinstance(layer, NarrowLayer)]
    assert report.layers == len(narrow_layers) == sum(report.products.values())
    assert weight_precision_of(narrow) == report.precision == precision
    if precision == "int8":
        products = [int8_product(torch.device("cpu"), layer.weight.shape[1]) for layer in narrow_layers]
        assert report.products == {name: products.count(name) for name in products}
    assert f"held as {precision}" in report.sentence()


def test_what_stays_in_float32_stays_untouched():
    """Gates, norms, biases, convolutions, sigmas and random matrices keep their type and their bits."""
    model, narrow, report = held("gated", "int8")
    before, after = model.state_dict(), narrow.state_dict()
    kept = {name for name in before if torch.equal(before[name].float(), after[name].float())}
    assert report.layers == 2 * 4 + 1
    matrices = ("qkv.weight", "out.weight", "mlp_in.weight", "embedding.weight")
    assert kept == {name for name in before if not name.endswith(matrices)}
    assert {name.rpartition(".")[2] for name in after if name not in before} == {"scale"}
    assert isinstance(narrow.blocks[0].mixer.gate, torch.nn.Linear)
    assert isinstance(narrow.blocks[0].mlp_in, Int8Linear) and isinstance(narrow.embedding, Int8Embedding)
    assert isinstance(held("gated", "bfloat16")[1].blocks[0].mlp_in, Bfloat16Linear)


@pytest.mark.parametrize("precision", NARROW)
def test_rounded_weights_are_not_trained_and_not_saved(precision, tmp_path):
    """train(), a gradient, and saving end with what was asked, why not, and what to do; no folder is left."""
    _, narrow, _ = held("gated", precision)
    with pytest.raises(InputError, match=f"weights held as {precision}, .*load the model with weights float32"):
        narrow.train()
    assert not any(module.training for module in narrow.modules() if isinstance(module, NarrowLayer))
    with pytest.raises(InputError, match=f"gradient was asked for through weights held as {precision}"):
        narrow.blocks[0].mlp_in(torch.zeros(1, 64, requires_grad=True))
    assert not any(parameter.requires_grad for parameter in narrow.parameters())
    with pytest.raises(InputError, match=f"held as {precision} cannot be saved"):
        save_model(narrow, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    narrow.eval()


def test_what_cannot_be_rounded_is_refused():
    """Rounding twice, another kind of model and a precision that there is not are refused in words."""
    _, narrow, _ = held("gated", "int8")
    with pytest.raises(ConfigError, match="held as int8 already"):
        hold_weights_as(narrow, "bfloat16")
    with pytest.raises(ConfigError, match="asked of a Linear"):
        hold_weights_as(torch.nn.Linear(2, 2), "int8")
    with pytest.raises(ConfigError, match="'int4' were asked for; choose float32, bfloat16 or int8"):
        hold_weights_as(another_model(), "int4")


def test_a_folder_is_loaded_in_any_precision(tmp_path):
    """`load_model` gives the same model held differently; the folder stays what it was."""
    folder = write_small_folder(tmp_path / "small")
    for precision in ("float32", *NARROW):
        model = load_model(folder, weights=precision)
        assert weight_precision_of(model) == precision
        assert not model.training
    sizes = [weight_bytes(load_model(folder, weights=precision)) for precision in ("int8", "bfloat16", "float32")]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("precision", NARROW)
def test_ranks_read_as_one_does(precision):
    """Over ranks with few and many tokens each, hidden states and the state are those of one rank."""
    _, narrow, _ = held("gated", precision)
    layout = SequenceLayout.from_lengths([30, 0, 10])

    @torch.inference_mode()
    def body(comm):
        start, stop = layout.range(comm.rank)
        h_BLD, state = narrow.hidden(TOKENS[:, start:stop], ShardedSequenceOps(comm, layout))
        return h_BLD, [t for layer in state.layers for t in layer.tensors()]

    parts = run_simulated(body, 3)
    with torch.inference_mode():
        want_BLD, want = narrow.hidden(TOKENS)
    assert_close(torch.cat([part for part, _ in parts], dim=1).bfloat16(), want_BLD.bfloat16())
    for _, tensors in parts:
        for a, b in zip(tensors, (t for layer in want.layers for t in layer.tensors()), strict=True):
            assert_close(a.bfloat16() if a.is_floating_point() else a, b.bfloat16() if b.is_floating_point() else b)

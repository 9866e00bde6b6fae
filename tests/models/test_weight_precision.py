"""Models whose weights are held in fewer bits: what is rounded, what it costs, and what such a model refuses."""

import copy

import pytest
import torch

from dist_attn.checkpoints import load_model, load_model_and_tokeniser, save_model
from dist_attn.comm import run_simulated
from dist_attn.costs import read_model_costs
from dist_attn.errors import ConfigError, InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers.narrow_layers import Bfloat16Linear, Int8Embedding, Int8Linear, NarrowLayer
from dist_attn.models import ModelState, hold_weights_as, weight_bytes, weight_precision_of
from dist_attn.ops.narrow_weights import int8_product, widen_rows
from dist_attn.ops.whole_vectors import RowBlocks
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


def in_float64(model):
    """Everything around the rounded layers in float64, in which their products round nothing."""
    for layer in model.modules():
        if not isinstance(layer, NarrowLayer):
            for tensors in (layer._parameters, layer._buffers):
                tensors.update({name: as_float64(tensor) for name, tensor in tensors.items() if tensor is not None})
    model.embedding.register_forward_hook(lambda _, __, x: x.double())
    return model


def as_float64(tensor):
    """The same numbers, whole ones as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    made = tensor.double() if tensor.is_floating_point() else tensor
    return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made


def beginning(model, batch):
    """The state before any token, in float64."""
    state = model.initial_state(batch)
    layers = tuple(s.replace(tuple(as_float64(t) for t in s.tensors())) for s in state.layers)
    return ModelState(layers, state.position_B)


def assert_states_close(got, want, kind="state"):
    """Every tensor of every layer."""
    for a, b in zip(got.layers, want.layers, strict=True):
        for one, other in zip(a.tensors(), b.tensors(), strict=True):
            assert_close(one, other, kind=kind)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("case", MODEL_CASES)
@torch.inference_mode()
def test_every_model_reads_and_writes_as_its_rounded_weights_say(case, precision):
    """In float64, where products round nothing, blocks, steps and states are those of the widened weights alone."""
    model, narrow, _ = held(case, precision)
    wide = in_float64(widened(model, narrow))
    model, narrow = in_float64(model), in_float64(narrow)
    want_BLV, want = wide(TOKENS, state=beginning(wide, 2))
    got_BLV, state = narrow(TOKENS, state=beginning(narrow, 2))
    assert_close(got_BLV, want_BLV)
    assert_states_close(state, want)
    # The weights that were not rounded would be far outside of that.
    unrounded_BLV, _ = model(TOKENS, state=beginning(model, 2))
    assert (unrounded_BLV - want_BLV).abs().max() > 1e-4
    stepped, wanted = beginning(narrow, 2), beginning(wide, 2)
    for t in range(4):
        got_BV, stepped = narrow.step(TOKENS[:, t], stepped)
        want_BV, wanted = wide.step(TOKENS[:, t], wanted)
        assert_close(got_BV, want_BV)
        assert_states_close(stepped, wanted)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("case", MODEL_CASES)
@torch.inference_mode()
def test_fast_products_change_a_model_by_their_rounding_alone(case, precision):
    """In float32 logits and states are the widened weights' but for bfloat16 inputs and results; types too."""
    model, narrow, _ = held(case, precision)
    wide = widened(model, narrow)
    (want_BLV, want), (got_BLV, state) = wide(TOKENS), narrow(TOKENS)
    assert_close(got_BLV.bfloat16(), want_BLV.bfloat16())
    for made, wanted in ((state, want), (narrow.initial_state(2), wide.initial_state(2))):
        for a, b in zip(made.layers, wanted.layers, strict=True):
            for one, other in zip(a.tensors(), b.tensors(), strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                if one.is_floating_point():
                    assert (one - other).norm() <= 2**-5 * other.norm().clamp_min(2**-5)
    after = narrow.initial_state(2)
    for t in range(4):
        got_BV, after = narrow.step(TOKENS[:, t], after)
        assert_close(got_BV.bfloat16(), want_BLV[:, t].bfloat16())


@pytest.mark.parametrize("case", MODEL_CASES)
def test_bytes_are_those_of_the_tensors_and_of_the_formula(case, tmp_path):
    """The report, the state_dict and the planner agree to the byte; counts of layers and products do too."""
    for precision in ("float32", *NARROW):
        check_bytes(case, precision, write_config(case, tmp_path))


def check_bytes(case, precision, folder):
    """Of one precision; the planner reads `folder`."""
    model, narrow, report = held(case, precision)
    assert report.bytes_before == weight_bytes(model)
    saved = sum(t.nbytes for t in model.state_dict().values()) - sum(t.nbytes for t in narrow.state_dict().values())
    assert report.bytes_after == weight_bytes(narrow) == report.bytes_before - saved
    assert read_model_costs(folder, precision).weights_bytes == report.bytes_after
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
    assert not any(module.training for module in narrow.modules())
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


@pytest.mark.parametrize("precision", NARROW)
def test_weights_that_are_not_finite_are_named(precision):
    """The tensor is named, and the model stays what it was."""
    model = another_model()
    with torch.no_grad():
        model.blocks[1].mlp_out.weight[2, 3] = float("nan")
    with pytest.raises(InputError, match=rf"^blocks\.1\.mlp_out\.weight holds NaN .* no form as {precision}"):
        hold_weights_as(model, precision)
    assert weight_precision_of(model) == "float32"


def test_a_precision_that_there_is_not_is_refused_before_anything_is_read(tmp_path):
    """Even where the folder is not there."""
    for load in (load_model, load_model_and_tokeniser):
        with pytest.raises(ConfigError, match="'int4' were asked for; choose float32, bfloat16 or int8"):
            load(tmp_path / "nowhere", weights="int4")


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


@torch.inference_mode()
def test_an_int8_model_reads_the_same_bits_over_ranks_where_that_is_asked():
    """With `deterministic`, as `encode` is run, slices of 64 and 10 tokens have the bits of one slice of all."""
    _, narrow, _ = held("gated", "int8")
    tokens_BL = torch.randint(0, 96, (1, 74), generator=torch.Generator().manual_seed(0))

    def over(lengths):
        layout = SequenceLayout.from_lengths(lengths)

        @torch.inference_mode()
        def body(comm):
            ops = ShardedSequenceOps(comm, layout, deterministic=True)
            with RowBlocks():
                h_BLD, state = narrow.hidden(tokens_BL[:, slice(*layout.range(comm.rank))], ops)
                return narrow.readout(h_BLD), state

        return run_simulated(body, len(lengths))

    ((want_BLV, want),) = over([74])
    parts = over([64, 10])
    assert_close(torch.cat([part for part, _ in parts], dim=1), want_BLV, kind="exact")
    for _, state in parts:
        assert_states_close(state, want, kind="exact")

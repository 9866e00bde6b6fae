"""A loss or gradient that is not finite: the step, the layer where it begins and the rank are in one line."""

from functools import wraps

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import DistAttnError, EngineError
from dist_attn.ops import LocalSequenceOps
from dist_attn.training import train
from dist_attn.training.finite import Search
from dist_attn.training.language_task import LanguageTask
from tests.support.training import small_run

AT = 4


class _Spoil(torch.autograd.Function):
    """The identity; its gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 0.0 * grad.sign()


def _spoilt(monkeypatch, where, change, *, step=AT, everywhere=True):
    """From a step on, the module at `where` of the model gives `change` of what it gave; or on the last rank only."""
    whole = LanguageTask.loss

    def loss(self, at, rows):
        here = everywhere or self._share.rows(2).start or self._share.tokens(24).start
        module = self.model.get_submodule(where)
        if at >= step and here and "forward" not in vars(module):
            forward = module.forward
            module.forward = lambda *given: change(forward(*given))
        return whole(self, at, rows)

    monkeypatch.setattr(LanguageTask, "loss", loss)


def _first_is_nan(x):
    return torch.cat([x.new_full((1,), float("nan")), x.flatten()[1:]]).view_as(x)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("where", ["blocks.1.mlp_in", "blocks.0.mixer.qkv", "norm", "embedding"])
def test_a_nan_is_traced_to_the_layer_that_made_it(tmp_path, monkeypatch, where, recomputed):
    """The line names step, layer, checkpoint and way out; the weights of the last checkpoint are finite."""
    _spoilt(monkeypatch, where, _first_is_nan)
    config = small_run(tmp_path, checkpoint_every=1, activation_checkpointing=recomputed)
    with pytest.raises(EngineError) as caught:
        train(config)
    assert str(caught.value) == (
        f"the loss is nan at step 4: first in the output of {where}. The last checkpoint, step-000004, is sound: "
        "lower optimiser.learning_rate or set run.dtype = float32 in a new run"
    )
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-000004" / "model.safetensors")
    assert all(bool(t.isfinite().all()) for t in weights.values())
    assert not (tmp_path / "run" / "model").exists()


def test_a_nan_inside_an_operation_is_traced_to_its_token(tmp_path, monkeypatch):
    """Where an operation along the sequence makes it, the line has the operation, its mixer and the token."""
    whole = LocalSequenceOps.linear_attention

    @wraps(whole)
    def spoilt(self, *args, **kwargs):
        out, *rest = whole(self, *args, **kwargs)
        out = out.clone()
        out[1, :, 5:] = float("inf")
        return (out, *rest)

    monkeypatch.setattr(LocalSequenceOps, "linear_attention", spoilt)
    place = r"its output 0 is infinite at token 5 \(row 1 of the batch; .*\)\. There is no checkpoint yet: lower"
    with pytest.raises(EngineError, match=rf"at step 0: first in linear_attention in blocks\.0\.mixer: {place}"):
        train(small_run(tmp_path))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("blocks.1.mlp_out", "the backward pass of blocks.1.mlp_out"),
        ("blocks.0.mixer.out", "the backward pass of blocks.0.mixer.out"),
        ("norm", "the backward pass of norm"),
    ],
)
def test_an_infinite_gradient_is_traced_to_the_layer_that_made_it(tmp_path, monkeypatch, where, words, recomputed):
    """The line names the layer whose gradient was finite at its output and is not at its input."""
    _spoilt(monkeypatch, where, _Spoil.apply)
    with pytest.raises(EngineError, match=rf"the norm of the gradients is (nan|inf) at step 4: first in {words}"):
        train(small_run(tmp_path, activation_checkpointing=recomputed))


def test_a_gradient_spoilt_between_modules_is_placed_between_them():
    """A function inside a module has no name: the line names the module around it and where the gradient arrives."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return _Spoil.apply(self.inner(x)).tanh()

    model = nn.Sequential(nn.Linear(3, 3), Root())
    search = Search(model)
    with search.looking():
        model(torch.ones(2, 3)).sum().backward()
    finding = search.gradient()
    assert finding is not None
    assert finding.words == "the backward pass of 1, where it reaches 1.inner"
    search = Search(model[0])
    with search.looking():
        _Spoil.apply(model[0](torch.ones(2, 3))).sum().backward()
    finding = search.gradient()
    assert finding is not None
    assert finding.words == "the gradient of the loss, where it reaches the model"


def test_a_loss_that_is_nan_behind_finite_layers_says_so(tmp_path, monkeypatch):
    """Where every layer is finite and the loss is not, the line does not blame a layer."""
    whole = LanguageTask.loss
    monkeypatch.setattr(LanguageTask, "loss", lambda *args: whole(*args) * float("nan"))
    with pytest.raises(EngineError, match="the loss is nan at step 0: every layer is finite when the step runs again"):
        train(small_run(tmp_path))


def test_a_parameter_that_is_nan_from_the_start_is_named(tmp_path, monkeypatch):
    """Weights that a run began with and that are not finite are the origin."""
    whole = LanguageTask.__init__

    def spoilt(self, *args):
        whole(self, *args)
        with torch.no_grad():
            self.model.get_parameter("blocks.1.mlp_in.weight")[0, 0] = float("nan")

    monkeypatch.setattr(LanguageTask, "__init__", spoilt)
    with pytest.raises(EngineError, match=r"the parameter blocks\.1\.mlp_in\.weight itself, which the run began with"):
        train(small_run(tmp_path))


def _trained(config, comm: Communicator) -> str:
    try:
        train(config, comm=comm)
    except DistAttnError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("axis", ["data_ranks", "sequence_ranks"])
def test_every_rank_stops_and_says_the_same(tmp_path, monkeypatch, axis):
    """A NaN on rank 1 of 2 stops both with one line that names it, although rank 0 meets the NaN as well."""
    _spoilt(monkeypatch, "blocks.0.mlp_out", _first_is_nan, step=0, everywhere=False)
    config = small_run(tmp_path, **{axis: 2})
    said = run_simulated(lambda comm: _trained(config, comm), 2)
    assert said[0] == said[1]
    assert "the loss is nan at step 0: first in the output of blocks.0.mlp_out (rank 1 of 2). There is no" in said[0]


@pytest.mark.parametrize("axis", ["data_ranks", "sequence_ranks"])
def test_every_rank_hears_where_a_gradient_went_wrong(tmp_path, monkeypatch, axis):
    """An infinite gradient on rank 1 of 2 stops both with its layer and rank."""
    _spoilt(monkeypatch, "blocks.1.mlp_out", _Spoil.apply, step=0, everywhere=False)
    config = small_run(tmp_path, **{axis: 2})
    said = run_simulated(lambda comm: _trained(config, comm), 2)
    assert said[0] == said[1]
    assert "first in the backward pass of blocks.1.mlp_out (rank 1 of 2)" in said[0]

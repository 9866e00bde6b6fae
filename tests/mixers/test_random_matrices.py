"""Random vectors: orthogonal ones, and a pool that is drawn from in training and fixed at test."""

from collections.abc import Callable

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from dist_attn.mixers import (
    BidirectionalConfig,
    RandomFeatureAttention,
    RandomFeatureConfig,
    build_mixer,
    redraw_pools,
)
from dist_attn.mixers.random_matrices import draw_from_pool, orthogonal_rows, pool_matrix
from dist_attn.models import Model, ModelConfig, build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.training import train
from tests.support.closeness import assert_close
from tests.support.models import small_config
from tests.support.training import small_run


def _mixer(**options: object) -> RandomFeatureAttention:
    values = {"kind": "rfa", "hidden_size": 12, "num_heads": 3, "num_random": 8, **options}
    return RandomFeatureAttention(RandomFeatureConfig.model_validate(values))


def test_orthogonal_rows_are_orthogonal_and_as_long_as_gaussian_ones() -> None:
    """Within every K rows no two have a common direction, and the mean square of the lengths is K."""
    w_DK = orthogonal_rows(4002, 6, torch.Generator().manual_seed(0)).double()
    units_NKK = torch.nn.functional.normalize(w_DK, dim=1).unflatten(0, (-1, 6))
    products = units_NKK @ units_NKK.transpose(1, 2)
    assert_close(products.float(), torch.eye(6).expand_as(products))
    assert w_DK.square().sum(1).mean().item() == pytest.approx(6, rel=0.03)
    assert w_DK.mean().abs().item() < 0.02
    assert orthogonal_rows(8, 6, torch.Generator()).shape == (8, 6)


def test_orthogonal_features_estimate_the_kernel_better() -> None:
    """Over many draws the estimates have the Gaussian kernel as their mean, with a smaller variance than others."""
    x, y = torch.tensor([0.6, 0.0, 0.8, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    estimates = {}
    for orthogonal in (False, True):
        draws = torch.stack([pool_matrix(0, i, 4, 4, orthogonal=orthogonal) for i in range(2000)])
        estimates[orthogonal] = (draws @ (x - y)).cos().mean(1)
    kernel = torch.exp(-(x - y).square().sum() / 2).item()
    for found in estimates.values():
        assert found.mean().item() == pytest.approx(kernel, abs=0.03)
    assert estimates[True].var() < 0.8 * estimates[False].var()


def test_a_pool_is_drawn_from_in_training_alone() -> None:
    """A step gives each head a matrix of the pool, a function of the step; at test each keeps one."""
    mixer, fixed = _mixer(pool=10), _mixer(pool=10).w_HDK
    seen = set()
    for step in range(40):
        assert mixer.redraw(step)
        chosen = draw_from_pool(0, step, 3, 10)
        assert len(set(chosen)) == 3
        seen |= set(chosen)
        want = torch.stack([pool_matrix(0, i, 8, 4, orthogonal=False) for i in chosen])
        assert torch.equal(mixer.train().feature_map().tensors()[0], want)
        assert torch.equal(mixer.eval().feature_map().tensors()[0], fixed)
    assert seen == set(range(10))
    assert draw_from_pool(0, 7, 3, 10) != draw_from_pool(1, 7, 3, 10)
    assert not _mixer().redraw(3)


ENCODER = {"hidden_size": 12, "num_layers": 2, "mlp_size": 12, "positions": "none"}
HEADS = {"hidden_size": 12, "num_heads": 3, "num_random": 8, "pool": 10, "orthogonal": True}
SEEN = {"kind": "bidirectional", "attention": "rfa", **HEADS}
POOLED: dict[str, dict[str, object]] = {
    "language_model": {
        "hidden_size": 12,
        "num_layers": 2,
        "mlp_size": 12,
        "vocab_size": 7,
        "mixer": {"kind": "rfa_gate", **HEADS},
    },
    "text_classifier": {"vocab_size": 7, "num_classes": 2, "encoder": {**ENCODER, "mixer": SEEN}},
}


@pytest.mark.parametrize("kind", POOLED)
def test_every_kind_of_model_draws_from_its_pools(kind: str) -> None:
    """A redraw changes what the model gives in training, by the step alone, and nothing at test."""
    config = TypeAdapter(ModelConfig).validate_python({"kind": kind, **POOLED[kind]})
    model = build_model(config)
    tokens = torch.arange(8)[None] % 7

    def output() -> torch.Tensor:
        with torch.no_grad():
            return model.logits(tokens) if kind == "language_model" else model.classify(tokens)

    assert_draws_from_its_pools(model, output)


def assert_draws_from_its_pools(model: Model, output: Callable[[], torch.Tensor]) -> None:
    """A redraw changes `output` in training, by the step alone, and nothing at test."""
    at_test = model.eval() and output()
    outputs = []
    for step in (4, 5, 4):
        assert redraw_pools(model, step)
        outputs.append(model.train() and output())
        assert torch.equal(model.eval() and output(), at_test)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_orthogonal_matrices_are_those_of_every_mixer() -> None:
    """The option means the same for attention that sees all keys as for causal attention: the same matrices."""
    values = {"hidden_size": 12, "num_heads": 3, "num_random": 8, "orthogonal": True}
    seen = build_mixer(BidirectionalConfig(attention="rfa", **values))
    assert torch.equal(seen.attend.w_HDK, _mixer(orthogonal=True).w_HDK)
    for options in (
        {"pool": 2},
        {"attention": "softmax", "pool": 200},
        {"attention": "elu", "orthogonal": True},
        {"attention": "elu", "sigma": 2.0},
    ):
        with pytest.raises(ValidationError):
            BidirectionalConfig.model_validate({"hidden_size": 12, "num_heads": 3, "attention": "rfa", **options})


def test_one_gate_for_all_heads() -> None:
    """A shared gate is one number per token: all heads forget alike."""
    mixer = _mixer(kind="rfa_gate", shared_gate=True)
    assert mixer.gate is not None
    assert mixer.gate.weight.shape == (1, 12)
    _, state = mixer(torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0)), LocalSequenceOps())
    decays = state.attention.log_decay_BH
    assert torch.equal(decays, decays[:, :1].expand_as(decays))


def test_a_run_with_a_pool_goes_on_where_it_was(tmp_path) -> None:
    """Training with a pool of 200, stopped at a checkpoint and resumed, ends with the metrics of an undisturbed run."""
    mixer = {"kind": "rfa_gate", "hidden_size": 16, "num_heads": 2, "num_random": 8, "pool": 200}
    model = small_config(mixer=mixer)
    ends = []
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        run = small_run(tmp_path / name, steps=6)
        alone = run.data.model_copy(update={"stateful": False})
        run = run.model_copy(update={"model": model, "data": alone})
        if name == "stopped":
            train(run)
            for late in sorted((run.run.folder / "checkpoints").iterdir())[1:]:
                for path in late.iterdir():
                    path.unlink()
                late.rmdir()
        ends.append(train(run, resume=name == "stopped")["bits_per_byte"])
    assert ends[0] == ends[1]

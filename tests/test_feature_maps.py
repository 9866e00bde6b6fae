"""Feature maps: the kernels they estimate, their variance, their gradients through attention, their errors."""

import math

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn.feature_maps import (
    ArcCosine,
    EluPlusOne,
    Gaussian,
    Positive,
    arc_cosine,
    elu_plus_one,
    gaussian,
    positive,
)
from dist_attn.ops import FeatureMap
from tests.support.closeness import assert_close
from tests.support.golden import golden

DRAWS, SIZE = 400_000, 6


def _pair(distance: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(SIZE, generator=g, dtype=torch.float64)
    step = torch.randn(SIZE, generator=g, dtype=torch.float64)
    return x, x + distance * step / step.norm()


def _independent_estimates(phi, x: torch.Tensor, y: torch.Tensor, sigma: float, d: int) -> torch.Tensor:
    """DRAWS // d independent estimates phi(x).phi(y), each from d random vectors."""
    g = torch.Generator().manual_seed(0)
    w = sigma * torch.randn(DRAWS // d, d, SIZE, generator=g, dtype=torch.float64)
    heads = w.shape[0]
    fx, fy = (phi(t.expand(1, heads, 1, SIZE), w)[0, :, 0] for t in (x, y))
    return (fx * fy).sum(-1)


@pytest.mark.parametrize(("sigma", "distance"), [(0.5, 1.0), (1.0, 1.0), (1.0, 2.0), (2.0, 0.7)])
def test_gaussian_estimate_is_unbiased_with_the_stated_variance(sigma, distance):
    """Theorem 1 (corrected): the mean is exp(-z^2/2) and the variance (1 - exp(-z^2))^2 / 2D, z = sigma |x - y|."""
    x, y = _pair(distance)
    d = 8
    estimates = _independent_estimates(gaussian, x, y, sigma, d)
    z2 = (sigma * distance) ** 2
    want_mean, want_variance = math.exp(-z2 / 2), (1 - math.exp(-z2)) ** 2 / (2 * d)
    count = len(estimates)
    assert abs(float(estimates.mean()) - want_mean) < 4 * math.sqrt(want_variance / count)
    assert float(estimates.var()) == pytest.approx(want_variance, rel=0.05)


def test_arc_cosine_estimates_half_the_arc_cosine_kernel():
    """The mean is |x| |y| (sin t + (pi - t) cos t) / 2 pi for w ~ N(0, I)."""
    x, y = _pair(2.0)
    angle = torch.arccos(x @ y / (x.norm() * y.norm()))
    want = x.norm() * y.norm() * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
    estimates = _independent_estimates(arc_cosine, x, y, 1.0, 8)
    assert abs(float(estimates.mean() - want)) < 4 * float(estimates.std()) / math.sqrt(len(estimates))


def test_positive_estimates_the_exponential_kernel():
    """The mean is exp(x.y) for w ~ N(0, I), and every feature is positive."""
    x, y = (0.5 * t for t in _pair(1.0))
    estimates = _independent_estimates(positive, x, y, 1.0, 8)
    want = float((x @ y).exp())
    assert abs(float(estimates.mean()) - want) < 4 * float(estimates.std()) / math.sqrt(len(estimates))
    assert bool((positive(torch.randn(1, 2, 3, 4), torch.randn(2, 5, 4)) > 0).all())


@pytest.mark.parametrize(("name", "phi"), [("gaussian", gaussian), ("arccos", arc_cosine)])
def test_golden_features(name, phi):
    """phi of the golden queries and keys, in the order sin then cos, with or without a gradient."""
    g = golden(f"rfa_{name}_causal")
    w = g["W"] * g["sigma"][:, None, :]
    for side in "qk":
        x = g[side] / g[side].norm(dim=-1, keepdim=True)
        assert_close(phi(x, w), g[f"phi_{side}"], kind="golden")
        with torch.no_grad():
            assert_close(phi(x, w), g[f"phi_{side}"], kind="golden")


def test_frozen_maps_are_their_functions():
    """Each frozen callable equals its plain function, after unit-normalising where asked, and can change tensors."""
    x, w, other = torch.randn(2, 3, 5, 4), torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    unit = x / x.norm(dim=-1, keepdim=True)
    for kind, function in ((Gaussian, gaussian), (ArcCosine, arc_cosine), (Positive, positive)):
        phi = kind(w)
        assert isinstance(phi, FeatureMap)
        assert torch.equal(phi(x), function(x, w))
        assert_close(kind(w, unit_norm=True)(x), function(unit, w))
        assert torch.equal(phi.with_tensors(other)(x), function(x, other))
        assert phi.tensors()[0] is w
    assert torch.equal(EluPlusOne()(x), elu_plus_one(x))
    assert bool((elu_plus_one(x) > 0).all())


def test_a_zero_vector_has_features_and_a_small_gradient():
    """Unit-normalising a zero vector gives zero, and a gradient that the next layer can still multiply."""
    x = torch.zeros(1, 1, 2, 4, requires_grad=True)
    phi = Gaussian(torch.randn(1, 3, 4), unit_norm=True)(x)
    phi.sum().backward()
    assert bool(torch.isfinite(phi).all())
    assert float(x.grad.abs().max()) < 100


def test_wrong_shapes_are_named():
    """Random vectors of another head count or size raise a ShapeError that names both."""
    with pytest.raises(ShapeError, match="2 heads of size 4, w has 3 heads of size 4"):
        gaussian(torch.zeros(1, 2, 3, 4), torch.zeros(3, 5, 4))
    with pytest.raises(ShapeError, match="needed are x"):
        arc_cosine(torch.zeros(2, 3, 4), torch.zeros(3, 5, 4))

"""Performer and efficient attention against their definitions, pair by pair, and at the edges of what numbers hold."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError

from dist_attn.feature_maps import positive
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import BidirectionalConfig, redraw_pools
from dist_attn.mixers.all_keys import build_attention
from dist_attn.mixers.heads import HeadInputs, stable_key_weights
from dist_attn.ops import Denominator, LinearState, LocalSequenceOps, SequenceOps, softmax_attention
from dist_attn.ops.running_maximum import NO_TOKENS
from dist_attn_papers.mixers.efficient import EfficientAttention, efficient_attention, log_key_sizes
from dist_attn_papers.mixers.performer import PerformerAttention, PositiveRatios, positive_ratios
from dist_attn_papers.mixers.positive_configs import EfficientConfig, PerformerConfig
from tests.mixers.test_kernel_mixers import HEADS, SIZE, _causal_means, _heads
from tests.support.closeness import assert_close
from tests.support.sharded_call import check_sharded, random_tensor


def test_positive_ratios_are_positive_features_without_their_largest_factor():
    """Times exp(max w x - |x|^2 / 2) they are the positive features; for any x none is above D^-1/2, one is that."""
    x, w = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.randn(2, 9, 4, dtype=torch.float64)
    factor = (x @ w.transpose(-1, -2)).amax(-1, keepdim=True) - 0.5 * x.square().sum(-1, keepdim=True)
    assert_close(factor.exp() * positive_ratios(x, w), positive(x, w))
    largest = PositiveRatios(w.float())(1e3 * x.float()).amax(-1)
    assert_close(largest, torch.full_like(largest, 9**-0.5))


def _performer(**options: object) -> tuple[PerformerAttention, torch.Tensor]:
    """A mixer without a convolution, and its random vectors at softmax's temperature."""
    values = {"kind": "performer", "hidden_size": SIZE, "num_heads": HEADS, "num_random": 7, "short_convolution": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        mixer = PerformerAttention(PerformerConfig.model_validate({**values, **options})).double()
    return mixer, 4**-0.25 * mixer.w_HDK


def test_performer_is_its_definition() -> None:
    """Outputs are means by the products of positive features of q and k over K^(1/4), of all pairs."""
    (mixer, _), x = _performer(), random_tensor(2, 70, SIZE, seed=2)
    got, _ = mixer(x, LocalSequenceOps())
    q, k, v = _heads(x, mixer.qkv.weight)
    phi_q, phi_k = (positive(t * 4**-0.25, mixer.w_HDK) for t in (q, k))
    assert_close(got, _causal_means(phi_q @ phi_k.transpose(-1, -2), v) @ mixer.out.weight.T)


@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_performer_of_any_size_of_keys(size: float) -> None:
    """In float32, features as small as e^-4000 and as different as the keys make them give the means of float64."""
    (mixer, w), x = _performer(), random_tensor(2, 70, SIZE, seed=3)
    with torch.no_grad():
        mixer.qkv.weight[SIZE : 2 * SIZE] *= size
    q, k, v = _heads(x, mixer.qkv.weight.detach())
    logs_q, logs_k = ((t @ w.transpose(-1, -2)) - 0.5 * (t * 4**-0.25).square().sum(-1, keepdim=True) for t in (q, k))
    scores = torch.logsumexp(logs_q[:, :, :, None] + logs_k[:, :, None], dim=-1)
    future = torch.ones(70, 70, dtype=torch.bool).triu(1)
    means = (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    want = (means @ mixer.out.weight.T).detach()
    got, state = mixer.float()(x.float(), LocalSequenceOps())
    assert float((got.detach() - want).abs().max()) < 1e-3 * float(want.abs().max())
    assert all(bool(t.isfinite().all()) for t in state.tensors() if t.is_floating_point())
    assert size < 1 or float(logs_k.amax(-1).min()) < -1000


def test_performer_estimates_softmax() -> None:
    """With many random vectors outputs are those of softmax attention at its usual temperature."""
    (mixer, _), x = _performer(num_random=20_000), random_tensor(1, 12, SIZE, seed=4)
    got, _ = mixer(x, LocalSequenceOps())
    want = softmax_attention(*_heads(x, mixer.qkv.weight), causal=True).transpose(1, 2).flatten(2)
    assert float((got - want @ mixer.out.weight.T).detach().abs().max()) < 0.02


def test_performer_draws_from_its_pool() -> None:
    """In training a redraw takes other matrices of the pool, for features and key weights alike; at test nothing."""
    mixer, _ = _performer(pool=9)
    x = random_tensor(1, 20, SIZE, seed=5)
    at_test, _ = mixer.eval()(x, LocalSequenceOps())
    assert redraw_pools(mixer, 3)
    drawn = mixer.train().matrices()
    assert_close(mixer.eval()(x, LocalSequenceOps())[0], at_test, kind="exact")
    assert not torch.equal(mixer.train()(x, LocalSequenceOps())[0], at_test)
    mixer.w_HDK = drawn  # the same matrices at test give the same outputs
    in_training, _ = mixer(x, LocalSequenceOps())
    assert_close(mixer.eval()(x, LocalSequenceOps())[0], in_training, kind="exact")


@pytest.mark.parametrize("documents", [None, (0, 6, 7, 15)])
def test_bidirectional_performer_over_ranks(documents: tuple[int, ...] | None) -> None:
    """Without a mask, documents too, the outputs are the definition's, and those and all gradients those of ranks."""
    config = BidirectionalConfig(attention="performer", hidden_size=SIZE, num_heads=HEADS, num_random=6)
    attend = build_attention(config).double()
    q, k, v = (3 * random_tensor(2, HEADS, 20, 4, seed=seed) for seed in range(3))

    def call(ops: SequenceOps, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        local = LocalSequenceOps(documents) if isinstance(ops, LocalSequenceOps) else ops
        return (attend(*leaves, local)[0],)

    check_sharded(call, SequenceLayout.from_lengths([3, 0, 13, 4], documents), [q, k, v])
    starts = (0,) if documents is None else documents
    for start, stop in pairwise((*starts, 20)):
        phi_q, phi_k = (positive(t[:, :, start:stop] * 4**-0.25, attend.w_HDK) for t in (q, k))
        scores = phi_q @ phi_k.transpose(-1, -2)
        want = scores @ v[:, :, start:stop] / scores.sum(-1, keepdim=True)
        assert_close(call(LocalSequenceOps(), [q, k, v])[0][:, :, start:stop], want)


def test_options_that_do_not_fit_performer_are_refused() -> None:
    """Divisors with a fixed unit, pools too small for the heads, and unknown names are refused; orthogonal is usual."""
    values = {"kind": "performer", "hidden_size": SIZE, "num_heads": HEADS}
    for wrong in ({"denominator": {"kind": "clamp", "eps": 1.0}}, {"pool": 2}, {"feature": "gaussian"}):
        with pytest.raises(ValidationError):
            PerformerConfig.model_validate({**values, **wrong})
    assert PerformerConfig.model_validate(values).orthogonal
    assert BidirectionalConfig(attention="performer", hidden_size=SIZE, num_heads=HEADS).orthogonal


def _efficient_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """softmax(q) over features times the keys' softmax over the sequence that each token sees, times the values."""
    outs = []
    for t in range(q.shape[2]):
        seen = slice(t + 1) if causal else slice(None)
        context = k[:, :, seen].softmax(dim=2).transpose(-1, -2) @ v[:, :, seen]
        outs.append(q[:, :, t : t + 1].softmax(dim=-1) @ context)
    return torch.cat(outs, dim=2)


def _efficient(size: float = 1.0) -> tuple[EfficientAttention, torch.Tensor]:
    """A mixer without a convolution, whose keys are so large, and tokens."""
    config = EfficientConfig(kind="efficient", hidden_size=SIZE, num_heads=HEADS, short_convolution=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        mixer = EfficientAttention(config).double()
    with torch.no_grad():
        mixer.qkv.weight[SIZE : 2 * SIZE] *= size
    return mixer, random_tensor(2, 70, SIZE, seed=6)


def test_efficient_is_its_definition() -> None:
    """Outputs and the gradients of the projections are those of a softmax over features and one over the sequence."""
    mixer, x = _efficient()
    weight = mixer.qkv.weight.detach().clone().requires_grad_()
    got, _ = mixer(x, LocalSequenceOps())
    mixed = _efficient_naive(*_heads(x, weight), causal=True).transpose(1, 2).flatten(2)
    want = mixed @ mixer.out.weight.detach().T
    assert_close(got, want)
    weights = random_tensor(*want.shape, seed=7)
    (gradient,) = torch.autograd.grad((got * weights).sum(), mixer.qkv.weight)
    assert_close(gradient, torch.autograd.grad((want * weights).sum(), weight)[0], kind="gradient")


def _attend_efficiently(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, LinearState]:
    ops, nothing = LocalSequenceOps(), torch.full(k.shape[:2], NO_TOKENS, dtype=torch.float64)
    gate, scale, _ = stable_key_weights(log_key_sizes(k), ops, nothing)
    policy = Denominator("floor", 1e-12)
    return efficient_attention(HeadInputs(q, k, v, gate, scale), ops, causal=causal, denominator=policy)


@pytest.mark.parametrize("causal", [True, False])
def test_efficient_of_large_keys(causal: bool) -> None:
    """In float32, keys whose exponentials are 0 or infinite give the outputs of float64."""
    q, k, v = (random_tensor(2, HEADS, 70, 4, seed=seed) for seed in range(3))
    k = 3 * k + 400 * torch.sin(torch.arange(70.0))[:, None]
    got, state = _attend_efficiently(q.float(), k.float(), v.float(), causal=causal)
    want = _efficient_naive(q, k, v, causal=causal)
    assert float((got - want).abs().max()) < 1e-3
    assert all(bool(t.isfinite().all()) for t in state.tensors())


def test_efficient_of_features_that_are_far_apart() -> None:
    """Where one feature's keys are e^200 times another's in float32, outputs and gradients are numbers still."""
    mixer, x = _efficient(200.0)
    got, state = mixer.float()(x.float(), LocalSequenceOps())
    got.square().sum().backward()
    assert float(_heads(x.float(), mixer.qkv.weight.detach())[1].std()) > 100
    assert bool(got.isfinite().all()) and bool(mixer.qkv.weight.grad.isfinite().all())
    assert all(bool(t.isfinite().all()) for t in state.tensors())


@pytest.mark.parametrize("documents", [None, (0, 6, 7, 15)])
def test_bidirectional_efficient_over_ranks(documents: tuple[int, ...] | None) -> None:
    """Without a mask, documents too, the outputs are the definition's, and those and all gradients those of ranks."""
    config = BidirectionalConfig(attention="efficient", hidden_size=SIZE, num_heads=HEADS)
    attend = build_attention(config).double()
    q, k, v = (2 * random_tensor(2, HEADS, 20, 4, seed=seed) for seed in range(3))

    def call(ops: SequenceOps, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        local = LocalSequenceOps(documents) if isinstance(ops, LocalSequenceOps) else ops
        return (attend(*leaves, local)[0],)

    check_sharded(call, SequenceLayout.from_lengths([3, 0, 13, 4], documents), [q, k, v])
    (got,) = call(LocalSequenceOps(), [q, k, v])
    for start, stop in pairwise((*((0,) if documents is None else documents), 20)):
        parts = (t[:, :, start:stop] for t in (q, k, v))
        assert_close(got[:, :, start:stop], _efficient_naive(*parts, causal=False))

"""Random features of keys that are not normalised (RFA Eq. 12): golden vectors, any size of key, and every path."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dist_attn.feature_maps import Gaussian
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import BidirectionalConfig, RandomFeatureConfig, build_mixer
from dist_attn.mixers.heads import log_key_weights, stable_key_weights
from dist_attn.ops import Denominator, LocalSequenceOps, linear_attention, softmax_attention
from dist_attn.ops.linear_attention import linear_attention_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.sharded_call import check_sharded, random_tensor

EXACT = Denominator("exact", 0.0)
SIZE, HEADS = 12, 3


def _attend(ops, q, k, v, sigma, w, *, causal: bool, log_gate=None, key_scale=None, denominator=EXACT):
    zeros = torch.zeros(k.shape[:2], dtype=torch.float64)
    gate, scale, _ = stable_key_weights(
        log_key_weights(k, sigma), ops, zeros, log_gate_BHS=log_gate, key_scale_BHS=key_scale
    )
    return ops.linear_attention(
        q,
        k,
        v,
        feature_map=Gaussian(sigma * w),
        log_gate_BHS=gate,
        key_scale_BHS=scale,
        causal=causal,
        denominator=denominator,
    )[0]


@pytest.mark.parametrize("causal", [False, True])
def test_golden_vectors(causal: bool) -> None:
    """The independent vectors of Eq. 12, whose temperature is sigma^-2."""
    g = golden("rfa_eq12")
    q, k, v = (g[name][None, None] for name in "qkv")
    sigma = (g["tau2"] ** -0.5).expand(1, 1, 3)
    out = _attend(LocalSequenceOps(), q, k, v, sigma, g["W"][None] / sigma, causal=causal)
    assert_close(out[0, 0], g["out_causal" if causal else "out_noncausal"], kind="golden")


@pytest.mark.parametrize("denominator", [EXACT, Denominator("floor", 0.3)])
@pytest.mark.parametrize("causal", [False, True])
def test_gated_weights_equal_the_recurrence_with_weights_as_they_are(causal: bool, denominator: Denominator) -> None:
    """Relative weights under gates give the outputs and gradients of exp(|sigma k|^2 / 2) put in one by one."""
    leaves = [random_tensor(2, HEADS, 70, 4, seed=seed).requires_grad_() for seed in range(3)]
    sigma = (0.5 + random_tensor(HEADS, 1, 4, seed=3).abs()).requires_grad_()
    logits = random_tensor(2, HEADS, 70, seed=4).requires_grad_()
    w = random_tensor(HEADS, 8, 4, seed=5)
    gates = {"log_gate": torch.nn.functional.logsigmoid(logits), "key_scale": torch.sigmoid(-logits)}
    got = _attend(LocalSequenceOps(), *leaves, sigma, w, causal=causal, denominator=denominator, **gates)
    want, _ = linear_attention_naive(
        *leaves,
        feature_map=Gaussian(sigma * w),
        log_gate_BHS=gates["log_gate"],
        key_scale_BHS=gates["key_scale"] * log_key_weights(leaves[1], sigma).exp(),
        causal=causal,
        denominator=denominator,
    )
    assert_close(got, want)
    weights, inputs = random_tensor(*want.shape, seed=6), [*leaves, sigma, logits]
    grads = [torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, kind="gradient")


def test_it_estimates_softmax() -> None:
    """With many random vectors keys and queries of any length give softmax attention, which unit norms do not."""
    q, k, v = (size * random_tensor(1, 1, 12, 4, seed=seed) for seed, size in enumerate((0.7, 0.7, 1.0)))
    sigma = torch.full((1, 1, 4), 4**-0.25, dtype=torch.float64)
    w = random_tensor(1, 200_000, 4, seed=3)
    got = _attend(LocalSequenceOps(), q, k, v, sigma, w, causal=True)
    want = softmax_attention(q, k, v, causal=True)
    assert float((got - want).abs().max()) < 0.02
    unit, _ = linear_attention(q, k, v, feature_map=Gaussian(sigma * w, unit_norm=True), denominator=EXACT)
    assert float((unit - want).abs().max()) > 0.3


def test_long_keys_neither_overflow_nor_hide_later_ones() -> None:
    """In float32, keys whose weights are e^450, and small ones behind a gate that has closed on them, count rightly."""
    k = torch.full((1, 1, 200, 4), 0.3)
    k[..., :5, :] = 15.0
    q, v = torch.full((1, 1, 200, 4), 0.1), random_tensor(1, 1, 200, 2, seed=0, dtype=torch.float32)
    sigma, w = torch.ones(1, 1, 4), torch.zeros(1, 3, 4)  # features are 1 everywhere: outputs are weighted means
    gates = torch.full((1, 1, 200), -5.0)
    out = _attend(LocalSequenceOps(), q, k, v, sigma, w, causal=True, log_gate=gates)
    weights = log_key_weights(k.double(), sigma.double())
    total = gates.double().cumsum(-1)
    scores = (weights - total)[..., None, :] + total[..., None]
    want = scores.masked_fill(torch.ones(200, 200).triu(1).bool(), -torch.inf).softmax(-1) @ v.double()
    assert float((out - want).abs().max()) < 1e-4


def _options(**changes: Any) -> dict[str, Any]:
    return {"hidden_size": SIZE, "num_heads": HEADS, "num_random": 6, "weighting": "norm", **changes}


@pytest.mark.parametrize("documents", [None, (0, 6, 7, 15)])
def test_bidirectional_and_cross_over_ranks(documents: tuple[int, ...] | None) -> None:
    """Without a mask and over a memory, documents too, outputs and all gradients are those of one rank."""
    q, k, v = (random_tensor(2, HEADS, 20, 4, seed=seed) for seed in range(3))
    whole = [0.5 + random_tensor(HEADS, 1, 4, seed=3).abs(), random_tensor(HEADS, 8, 4, seed=5)]

    def call(ops, leaves):
        local = LocalSequenceOps(documents) if isinstance(ops, LocalSequenceOps) else ops
        return (_attend(local, *leaves, causal=False),)

    layout = SequenceLayout.from_lengths([3, 0, 13, 4], documents)
    check_sharded(call, layout, [q, k, v], whole=whole)
    if documents is None:
        memory = SequenceLayout.from_lengths([0, 9, 6, 5])
        check_sharded(call, layout, [q], memory_layout=memory, memory=[k, v], whole=whole)
    assert layout.total == 20


def test_packed_documents_are_alone() -> None:
    """A document's outputs are those it has by itself, whatever the weights of the documents before it."""
    mixer = build_mixer(RandomFeatureConfig(kind="rfa", short_convolution=0, **_options())).double()
    x = random_tensor(1, 14, SIZE, seed=0)
    x[:, :6] *= 30
    got, _ = mixer(x, LocalSequenceOps((0, 6)))
    alone = [mixer(part, LocalSequenceOps())[0] for part in x.split([6, 8], dim=1)]
    assert_close(got, torch.cat(alone, dim=1))


@pytest.mark.parametrize(
    ("changes", "first"), [({}, 0.5**0.5), ({"weighting": "unit_norm"}, 1.0), ({"sigma": 0.7}, 0.7)]
)
def test_sigma_begins_where_it_is_told_to(changes: dict[str, Any], first: float) -> None:
    """sigma^2 = K^-1/2 with key weights, 1 with unit norms, or what the configuration says."""
    given = {**_options(), **changes}
    for config in (RandomFeatureConfig(kind="rfa", **given), BidirectionalConfig(attention="rfa", **given)):
        (sigma,) = (p for n, p in build_mixer(config).named_parameters() if n.endswith("sigma_H1K"))
        assert_close(sigma, torch.full((HEADS, 1, 4), first))


@pytest.mark.parametrize(
    "changes", [{"feature": "arc_cosine"}, {"denominator": {"kind": "clamp", "eps": 1.0}}, {"weighting": "norms"}]
)
def test_options_without_meaning_are_refused(changes: dict[str, Any]) -> None:
    """Another kernel's features, a divisor with a fixed unit, and unknown names are refused."""
    for config, kind in ((RandomFeatureConfig, {"kind": "rfa"}), (BidirectionalConfig, {"attention": "rfa"})):
        with pytest.raises(ValidationError):
            config.model_validate(_options(**kind, **changes))

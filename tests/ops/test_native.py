"""C kernels of linear attention for CPUs against the oracle in float64: outputs, states and every gradient."""

import pytest
import torch

from dist_attn.ops import Denominator, linear_attention
from dist_attn.ops.c_call import BLOCK, CHUNK, KEPT_STATES, View, kernels_of
from dist_attn.ops.c_library import NoLibraryError
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.native import Case, assert_like_the_oracle, by_kernels, map_of, needs_kernels

pytestmark = needs_kernels

KINDS = ["gaussian", "gaussian_unit", "arc_cosine", "arc_cosine_unit", "elu", "none"]
DRAWN = [
    "floor",
    "exact",
    "clamp",
    "sign_clamp",
    "mass",
    "one",
]  # of the random calls below, which one more would change
POLICIES = [*DRAWN, "abs_clamp"]
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 511, 512, 513, 1100]


def by_streaming(*args, **kwargs):
    """The streaming form, which is tested against the oracle itself: for what is too long for that."""
    return linear_attention(*args, **kwargs, implementation="streaming")


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("gate", [False, True])
def test_every_length(tokens, gate):
    """Lengths around vectors, chunks and blocks of the backward pass equal the reference, gated and not."""
    oracle = {"oracle": by_streaming} if tokens > 200 else {}
    case = Case(tokens, kind="gaussian_unit", gate=gate, scale=gate, state=True, batch=1)
    assert_like_the_oracle(case, **oracle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gate", "scale", "state"), [(False, False, False), (True, True, True), (False, True, False)])
def test_every_kind_of_features(kind, gate, scale, state):
    """Each feature map, with each option and without, equals the oracle; so does what is given as features."""
    assert_like_the_oracle(Case(70, kind=kind, gate=gate, scale=scale, state=state))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gate", [False, True])
def test_every_denominator_policy(policy, gate):
    """Each policy divides as the oracle's and its gradients do, where it replaces denominators and where not."""
    kind = "elu" if policy == "exact" else "gaussian_unit"
    assert_like_the_oracle(Case(40, kind=kind, gate=gate, scale=gate), denominator=Denominator(policy, 0.3))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 40, 3), (40, 65, 1), (65, 3, 40), (16, 64, 65)], ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "elu"])
def test_sizes_that_are_no_multiples_of_vectors(sizes, kind):
    """Head sizes, values and projections of any number, 1 included, equal the oracle's."""
    assert_like_the_oracle(Case(37, kind=kind, gate=True, scale=True, state=True, sizes=sizes, batch=1))


@pytest.mark.parametrize("kind", ["gaussian_unit", "none"])
def test_heads_of_the_largest_size(kind):
    """A head of 1,024 features and values equals the streaming form's."""
    case = Case(70, kind=kind, state=True, sizes=(1024, 1024, 512), batch=1, heads=1)
    case.sequence["k"] /= 8  # of a million sums of large terms one is always small
    assert_like_the_oracle(case, oracle=by_streaming)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(30, 90, True), (90, 30, True), (70, 20, False), (3, 130, False), (9, 0, True)]
)
@pytest.mark.parametrize("gate", [False, True])
def test_queries_and_keys_of_different_lengths(queries, keys, causal, gate):
    """Queries behind the last key, keys behind the last query and attention to all keys are the oracle's."""
    assert_like_the_oracle(Case(queries, keys, gate=gate, scale=gate, state=True), causal=causal)


@pytest.mark.parametrize(
    "documents", [(0,), (0, 1, 2), (5, 6, 70, 134), (64, 128), (63, 65, 129), (129,)], ids=lambda starts: str(starts)
)
@pytest.mark.parametrize("gate", [False, True])
def test_documents_do_not_see_each_other(documents, gate):
    """Packed documents, also of one token, equal the oracle's; before the first start a state goes on."""
    assert_like_the_oracle(Case(130 + 5, gate=gate, scale=gate, state=True, batch=1), documents=documents)


def test_key_scales_of_zero_and_below():
    """Keys that do not count and keys that count negatively have the oracle's results, gradients of scales too."""
    case = Case(70, gate=True, scale=True, state=True)
    case.sequence["key_scale"][:, :, ::3] = 0.0
    case.sequence["key_scale"][:, :, 1::7] *= -0.5
    assert_like_the_oracle(case, denominator=Denominator("one"))


@pytest.mark.parametrize("closed", [float("-inf"), -104.0, -1000.0, -90.0])
def test_closed_gates_leave_nothing(closed):
    """Gates of 0, alone and in a row, between gates of 1: no NaN, and no gradient through a closed one."""
    case = Case(140, kind="gaussian_unit", gate=True, scale=True, state=True, batch=1)
    gates = case.sequence["log_gate"]
    gates[:, :, 20:40] = 0.0
    for at in (0, 9, 10, 63, 64, 100):
        gates[:, :, at] = closed
    got, grads = [], []
    for attend, cast in ((by_streaming, torch.Tensor.double), (by_kernels, torch.clone)):
        leaves = case.leaves(cast)
        args, kwargs = case.arguments(leaves)
        out, after = attend(*args, **kwargs)
        weighted_sum(out, *after.tensors()[:3]).backward()
        got.append([out, *after.tensors()[:3]])
        grads.append(leaves)
    for one, other in zip(*got, strict=True):
        assert_close(other, one.float())
    for name, leaf in grads[1].items():
        assert_close(leaf.grad, grads[0][name].grad.float(), kind="gradient", what=name)


@pytest.mark.parametrize("growth", [1e-3, 0.05, 0.5])
def test_gates_above_one(growth):
    """A log gate above 0 lets what is older grow, inside a chunk and from chunk to chunk, as in the oracle."""
    case = Case(70, kind="elu", gate=True, state=True, batch=1)
    case.sequence["log_gate"] = torch.full_like(case.sequence["log_gate"], growth)
    leaves = case.leaves()
    args, kwargs = case.arguments(leaves)
    want, _ = by_streaming(*args, **kwargs)
    got, _ = by_kernels(*args, **kwargs)
    assert_close(got, want)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kind", ["gaussian_unit", "elu"])
def test_half_precision(kind, gate):
    """bf16 inputs come within their own precision of the oracle on the same numbers, from a float32 state."""
    case = Case(130, kind=kind, gate=gate, scale=gate, state=gate, sizes=(16, 16, 16), batch=1)
    assert_like_the_oracle(case, dtype=torch.bfloat16)


def test_gates_and_maps_of_other_types():
    """Gates, key scales and maps in float64 and half precision are read as what they are; gradients keep the type."""
    case = Case(40, gate=True, scale=True)
    case.sequence["log_gate"], case.sequence["key_scale"] = (
        case.sequence["log_gate"].double(),
        case.sequence["key_scale"].half(),
    )
    case.shared["w"] = case.shared["w"].bfloat16()
    found = []
    for attend in (by_streaming, by_kernels):
        leaves = case.leaves()
        args, kwargs = case.arguments(leaves)
        out, _ = attend(*args, **kwargs)
        weighted_sum(out).backward()
        found.append((out, leaves))
    assert_close(found[1][0], found[0][0])
    for name, leaf in found[1][1].items():
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad, found[0][1][name].grad, rtol=2e-2, atol=2e-2)


def heads_in_a_token(x):
    """[B, L, H, K] in memory, as projections of a model give it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x


def tokens_last(x):
    """The last dimension is the one with the largest step."""
    return x.transpose(2, -1).contiguous().transpose(2, -1) if x.dim() == 4 else x


def every_second(x):
    """Between numbers that are not to be read."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def part_of_wider(x):
    """Rows that begin anywhere in memory."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


@pytest.mark.parametrize("layout", [heads_in_a_token, tokens_last, every_second, part_of_wider])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_may_lie_anyhow(layout, dtype):
    """Views of every layout, gates and states included, give the oracle's results, and nothing else is written."""
    case = Case(70, gate=True, scale=True, state=True)
    assert_like_the_oracle(case, dtype=dtype, cast=layout, denominator=Denominator("mass"))


def test_tensors_may_be_expanded():
    """Keys and values that all heads share, and a gate that all tokens share, get the sum of their gradients."""
    case = Case(70, kind="elu", gate=True)
    found = []
    for attend in (by_streaming, by_kernels):
        leaves = {name: t[:, :1] if name in "kv" else t for name, t in case.leaves().items()}
        leaves["log_gate"] = leaves["log_gate"][:, :, :1]
        roots = list(leaves.values())
        wide = {name: t.expand(2, 2, 70, *t.shape[3:]) for name, t in leaves.items()}
        args, kwargs = case.arguments(wide)
        out, _ = attend(*args, **kwargs)
        found.append((out, torch.autograd.grad(weighted_sum(out), roots)))
    assert_close(found[1][0], found[0][0])
    for got, want in zip(found[1][1], found[0][1], strict=True):
        assert_close(got, want, kind="gradient")


def test_a_long_sequence_goes_back_by_stretches():
    """States that were not kept are found again, by stretches and parts of these: the streaming form's gradients."""
    tokens = 140_000
    assert tokens > KEPT_STATES**2 * BLOCK * CHUNK
    case = Case(tokens, kind="gaussian_unit", gate=True, scale=True, state=True, batch=1, heads=1, sizes=(4, 3, 4))
    case.sequence["log_gate"] *= 0.01
    found = []
    for attend in (by_streaming, by_kernels):
        leaves = case.leaves()
        args, kwargs = case.arguments(leaves)
        out, after = attend(*args, **kwargs, documents=(33_333,))
        weighted_sum(out[:, :, ::97], *after.tensors()[:3]).backward()
        found.append((out, leaves))
    assert_close(found[1][0], found[0][0])
    for name, leaf in found[1][1].items():
        got, want = leaf.grad, found[0][1][name].grad
        assert float((got - want).norm()) <= 1e-4 * float(want.norm()), name


@pytest.mark.parametrize("scale", [1e4, 3e5, 1e7])
def test_large_angles(scale):
    """Sine and cosine of angles of many turns are those of the angle in float32, to 2e-7; of infinity they are NaN."""
    generator = torch.Generator().manual_seed(0)
    angles = scale * torch.rand(1, 1, 4096, 1, generator=generator) - scale / 2
    # One key whose features [0, 1] (of the angle 0) pick the cosine; values pick nothing.
    keys, ones = torch.zeros(1, 1, 4096, 1), torch.zeros(1, 1, 4096, 1)
    keys[:, :, 0], ones[:, :, 0] = 0.0, 1.0
    phi = map_of("gaussian", {"w": torch.ones(1, 1, 1)})
    out, _ = by_kernels(angles, keys, ones, feature_map=phi, key_scale_BHS=ones[..., 0], denominator=Denominator("one"))
    assert float((out.double() - angles.double().cos()).abs().max()) < 2e-7
    angles[:, :, 5], angles[:, :, 6] = float("inf"), float("nan")
    out, _ = by_kernels(angles, keys, ones, feature_map=phi, denominator=Denominator("one"))
    assert out[0, 0, :, 0].isnan().nonzero()[:, 0].tolist() == [5, 6]


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    """Sixty calls of random shapes and options are the streaming form's in float64, gradients included."""
    pick = torch.Generator().manual_seed(1000 + seed)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (), generator=pick))]

    tokens, keys = one_of(1, 15, 33, 64, 65, 100, 129, 300), one_of(1, 17, 64, 200)
    full = one_of(False, False, True)
    case = Case(
        tokens,
        one_of(tokens, keys) if not full else keys,
        kind=one_of(*KINDS),
        gate=one_of(False, True),
        scale=one_of(False, True),
        state=one_of(False, True),
        batch=one_of(1, 2),
        heads=one_of(1, 3),
        sizes=(one_of(3, 8, 17, 32), one_of(1, 4, 16, 33), one_of(2, 8, 19)),
        seed=seed,
    )
    kind = one_of(*(p for p in DRAWN if p != "exact" or case.kind == "elu"))
    eps = 0.5 if case.kind.startswith("gaussian") else 0.1
    assert_like_the_oracle(case, oracle=by_streaming, causal=not full, denominator=Denominator(kind, eps))


def test_a_call_of_another_size_than_the_kernels_read_is_refused() -> None:
    """Where the fields of a call differ between C and Python, no kernel is called with it."""
    with pytest.raises(NoLibraryError, match="must have the same fields"):
        kernels_of("attention", View)

"""Linear attention by flash-linear-attention's kernels against the oracle; without a GPU in Triton's interpreter."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.comm import run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import (
    Denominator,
    LinearState,
    LocalSequenceOps,
    Watch,
    linear_attention,
    linear_attention_step,
    watching,
)
from dist_attn.ops.linear_attention import LinearCall, complete_sums, linear_attention_naive, local_sums
from dist_attn.sharded import ShardedSequenceOps
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.fla import fla_adapter, plain_fla
from tests.support.interpreter import one_at_a_time
from tests.support.native import Case, assert_like_the_oracle, assert_near_in_halves

__all__ = ["fla_adapter", "plain_fla"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fla_adapter")]

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds products of float32 to TF32")


def by_fla(q, k, v, **options):
    """`linear_attention` by name, on the device that there is; results on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def moved(value, device=device):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, LinearState):
            return LinearState(*(t.to(device) for t in value.tensors()))
        return value.with_tensors(*map(moved, value.tensors())) if hasattr(value, "with_tensors") else value

    options = {name: moved(value) for name, value in options.items()}
    out, after = linear_attention(moved(q), moved(k), moved(v), **options, implementation="fla")
    return out.cpu(), moved(after, "cpu")


def in_two_parts(q, k, v, *, state, denominator=None, documents=(), **options):
    """Outputs and the state after the last key, as ranks compute them."""
    call = LinearCall(q, k, v, **options, documents=documents, implementation="fla")
    sums, segment = local_sums(call)
    assert sums.dtype == torch.float32
    policy = Denominator() if denominator is None else denominator
    return complete_sums(replace(call, state=state, denominator=policy), sums), state.combine(segment)


like_the_oracle = partial(assert_like_the_oracle, kernels=by_fla)


@needs_no_gpu
@pytest.mark.parametrize(
    ("tokens", "kind", "gate", "scale", "state"),
    [
        (1, "gaussian_unit", True, True, True),
        (37, "gaussian", True, True, True),
        (64, "none", False, False, False),
        (70, "elu", True, False, False),  # an odd head size, which is made even
        (130, "arc_cosine_unit", False, True, True),
    ],
)
def test_kernels_equal_the_oracle(tokens, kind, gate, scale, state):
    """Output, final state and every gradient equal the oracle's for any length, with each option and without."""
    like_the_oracle(Case(tokens, kind=kind, gate=gate, scale=scale, state=state, batch=1))


@needs_no_gpu
@pytest.mark.parametrize(("documents", "gate"), [((0,), True), ((0, 9), False), ((5, 6, 40), True)])
def test_documents_do_not_see_each_other(documents, gate):
    """Packed documents of each row, also of one token, equal the oracle's, state and gradients too."""
    like_the_oracle(Case(70, gate=gate, scale=gate, state=True), documents=documents)


@needs_no_gpu
@pytest.mark.parametrize("kind", ["exact", "clamp", "sign_clamp", "abs_clamp", "mass", "one"])
def test_every_denominator_policy(kind):
    """Each policy that is not the default one is the oracle's, with its gradients."""
    case = Case(18, kind="elu", gate=True, scale=True, batch=1)
    like_the_oracle(case, denominator=Denominator(kind, 0.3))


@needs_no_gpu
def test_a_map_that_our_kernels_do_not_know():
    """torch makes the features, so any map will do."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 4, generator=generator) for _ in range(3))
    phi = feature_maps.Positive(torch.randn(2, 6, 4, generator=generator))
    got, _ = by_fla(q, k, v, feature_map=phi)
    assert_close(got, linear_attention_naive(q, k, v, feature_map=phi)[0])


@needs_no_gpu
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # numpy's, of numbers that a mask drops
def test_a_closed_gate_leaves_nothing():
    """Log gates of -inf and of -1000 cut off all that is older, without a NaN, in outputs, state and gradients."""
    case = Case(70, gate=True, scale=True, state=True, batch=1)
    case.sequence["log_gate"][:, :, 3] = -1000.0
    case.sequence["log_gate"][:, :, 66] = float("-inf")
    found = []
    for attend in (partial(linear_attention, implementation="streaming"), by_fla):
        leaves = case.leaves()
        args, kwargs = case.arguments(leaves)
        out, after = attend(*args, **kwargs)
        weighted_sum(out, *after.tensors()[:4]).backward()
        found.append((out, after, leaves))
    (want, want_after, want_leaves), (got, after, leaves) = found
    assert_close(got, want)
    assert_close(after.s_BHMV, want_after.s_BHMV, kind="state")
    for name, leaf in want_leaves.items():
        assert_close(leaves[name].grad, leaf.grad, kind="gradient", what=name)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "gate"), [(37, True), (1_000, False), (1_000, True)])
def test_bfloat16_on_a_gpu(tokens, gate):
    """bf16 inputs come within their own precision of the oracle, with state and gradients."""
    half_precision_equals_the_oracle(Case(tokens, kind="elu", gate=gate, scale=gate, state=True, sizes=(64, 64, 64)))


@pytest.mark.usefixtures("plain_fla")
@needs_no_gpu
@pytest.mark.parametrize(("tokens", "gate"), [(1, True), (70, False), (70, True)])
def test_bfloat16_by_the_plain_form(tokens, gate):
    """What is rounded to bf16 around the kernels is so little that results stay within it."""
    half_precision_equals_the_oracle(Case(tokens, kind="elu", gate=gate, scale=gate, state=True))


def half_precision_equals_the_oracle(case):
    """All results of q, k and v in bf16 are near those of the oracle in float64 on the same numbers."""
    for name in "qkv":
        case.sequence[name] = case.sequence[name].bfloat16()
    found = []
    for attend, cast in ((linear_attention_naive, torch.Tensor.double), (by_fla, torch.clone)):
        leaves = case.leaves(cast)
        args, kwargs = case.arguments(leaves)
        out, after = attend(*args, **kwargs)
        weighted_sum(out, *after.tensors()[:4]).backward()
        found.append(({"output": out, "state": after.s_BHMV, "state z": after.z_BHM}, leaves))
    (want, want_leaves), (got, leaves) = found
    assert got["output"].dtype == torch.bfloat16
    for name, exact in want.items():
        assert_near_in_halves(got[name].double(), exact, kind=name.split()[0], what=name)
    for name, leaf in want_leaves.items():
        assert_near_in_halves(leaves[name].grad.double(), leaf.grad, kind="gradient", what=name)


@needs_no_gpu
@pytest.mark.parametrize("gate", [False, True])
def test_two_parts_are_the_whole(gate):
    """Sums from nothing, completed by the state before, equal the oracle's with every gradient."""
    case = Case(70, kind="gaussian_unit", gate=gate, scale=gate, state=True, batch=1)
    assert_like_the_oracle(case, kernels=in_two_parts)


@needs_no_gpu
@pytest.mark.parametrize("gate", [False, True])
def test_over_ranks(gate, monkeypatch):
    """Ranks with uneven slices, one of them empty, have the outputs, the gradients and the state of one rank."""
    one_at_a_time(monkeypatch)
    case = Case(90, gate=gate, scale=gate, state=True, batch=1)
    weight = torch.randn(1, 2, 90, 4, generator=torch.Generator().manual_seed(1))

    def attend(ops, start, stop):
        leaves = {n: t[:, :, start:stop].clone().requires_grad_() for n, t in case.sequence.items()}
        args, kwargs = case.arguments({**leaves, **case.shared})
        out, after = ops.linear_attention(*args, **kwargs)
        (out * weight[:, :, start:stop]).sum().backward()
        return [out, *(leaf.grad for leaf in leaves.values())], after

    layout = SequenceLayout.from_lengths([67, 0, 23])
    found = run_simulated(
        lambda comm: attend(ShardedSequenceOps(comm, layout, implementation="fla"), *layout.range(comm.rank)), 3
    )
    whole, want_after = attend(LocalSequenceOps(implementation="streaming"), 0, 90)
    for parts, want in zip(zip(*(tensors for tensors, _ in found), strict=True), whole, strict=True):
        assert_close(torch.cat(parts, 2), want, kind="gradient")
    assert_close(found[0][1].s_BHMV, want_after.s_BHMV, kind="state")


@needs_no_gpu
def test_the_step_equals_the_sequence():
    """Token by token, with gradients through all steps, results are the oracle's."""

    def by_steps(q, k, v, *, log_gate_BHS, key_scale_BHS, state, feature_map):
        outs = []
        for t in range(q.shape[2]):
            out, state = linear_attention_step(
                *(x[:, :, t] for x in (q, k, v)),
                state,
                feature_map=feature_map,
                log_gate_BH=log_gate_BHS[:, :, t],
                key_scale_BH=key_scale_BHS[:, :, t],
                implementation="fla",
            )
            outs.append(out)
        return torch.stack(outs, dim=2), state

    assert_like_the_oracle(Case(3, gate=True, scale=True, state=True), kernels=by_steps)


def test_second_derivatives():
    """A backward pass that is differentiated again gives the streaming form's second derivatives."""
    (q, k, v), kwargs = (case := Case(5, batch=1)).arguments(case.leaves())
    found = []
    for attend in (linear_attention, by_fla):
        leaf = q.detach().clone().requires_grad_()
        out, _ = attend(leaf, k, v, feature_map=kwargs["feature_map"])
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)


def test_guarded_denominators_are_counted():
    """A watch hears of as many guarded denominators as from the streaming form, once."""
    (q, k, v), kwargs = (case := Case(20, batch=1)).arguments(case.leaves())
    counted = []
    for attend in (linear_attention, by_fla):
        with watching(watch := Watch()):
            out, _ = attend(q, k, v, feature_map=kwargs["feature_map"], denominator=Denominator(eps=0.9))
            out.sum().backward()
        counted.append((watch.denominators, watch.guarded))
    assert counted[0] == counted[1]
    assert sum(counted[0][1][0]) > 0

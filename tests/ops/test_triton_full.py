"""GPU kernels of attention that is not causal and of the parts of a sharded pass, against torch's own forms."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.comm import run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, LocalSequenceOps, absorb_keys, linear_attention
from dist_attn.ops.linear_attention import LinearCall, absorb, complete_sums, local_sums
from dist_attn.sharded import ShardedSequenceOps
from tests.ops.test_triton import DEVICE, SMALL, few, moved
from tests.support import fixed_order
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close
from tests.support.interpreter import one_at_a_time

pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")

from dist_attn.ops.linear_attention import triton_forward, triton_full

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Small tiles and few programs: a few tokens are several chunks and several splits of them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_forward, "SUM_PROGRAMS", 4)
    monkeypatch.setattr(triton_full, "tiles_for", lambda *_: SMALL)


def assert_like_torch(inputs, attention, *, dtype=torch.float32, maps=lambda phi: phi):
    """What `attention` gives by kernels equals what it gives by torch in float64, gradients too."""
    rounded = {name: t.to(dtype) if name in "qkv" else t for name, t in inputs.sequence.items()}
    found = []
    for implementation, cast in (("streaming", torch.Tensor.double), ("triton", moved)):
        sequence, replicated = (
            {name: cast(t).detach().clone().requires_grad_() for name, t in part.items()}
            for part in (rounded, inputs.replicated)
        )
        leaves = Inputs(sequence, replicated)
        args, kwargs = leaves.arguments()
        kwargs["feature_map"] = maps(kwargs["feature_map"])
        tensors = attention(*args, implementation=implementation, **kwargs)
        weighted_sum(*(t.cpu() for t in tensors)).backward()
        found.append(([t.cpu().to(dtype) for t in tensors], leaves.gradients()))
    (want, want_grads), (got, got_grads) = found
    for ours, exact in zip(got, want, strict=True):
        assert_close(ours, exact, kind="state" if dtype == torch.float32 else "output")
    for name, gradient in want_grads.items():
        assert_close(got_grads[name].cpu().to(dtype), gradient.to(dtype), kind="gradient", what=name)


def full(q, k, v, *, implementation, **options):
    """Outputs and final state of attention that is not causal, the first through the kernels' launcher or torch."""
    out, after = linear_attention(q, k, v, causal=False, implementation=implementation, **options)
    return out, *after.tensors()[:4]


@pytest.mark.parametrize(
    ("tokens", "gate", "scale", "state"), [(37, True, True, True), (16, False, False, False), (20, True, False, True)]
)
def test_full_attention_equals_torch(tokens, gate, scale, state):
    """Queries read the state after the last key: outputs, that state and every gradient are the streaming form's."""
    assert_like_torch(few(tokens, gate=gate, scale=scale, state=state), full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_attention_in_half_precision(dtype):
    """bf16 and fp16 inputs come within their own precision of the streaming form in float64."""
    assert_like_torch(few(35, gate=False, scale=False, state=False), full, dtype=dtype)


@pytest.mark.parametrize("kind", ["clamp", "mass"])
def test_other_maps_and_policies(kind):
    """elu + 1 under other denominator policies is the streaming form's, queries and keys of different lengths."""
    inputs = few(20, gate=False, scale=True, state=False)
    inputs.sequence["q"] = inputs.sequence["q"][:, :, :7]
    attention = partial(full, denominator=Denominator(kind, 0.3))
    assert_like_torch(inputs, attention, maps=lambda phi: feature_maps.EluPlusOne())


@pytest.mark.parametrize("gate", [False, True])
def test_the_parts_of_a_sharded_pass(gate):
    """Sums from nothing, completed with a state before them, and the state after them: as in torch, with gradients."""

    def parts(q, k, v, *, implementation, state, feature_map, **gates):
        call = LinearCall(q, k, v, feature_map=feature_map, implementation=implementation, **gates)
        from_state = replace(call, state=state)
        sums, after = local_sums(call)
        absorbed, out = absorb(from_state), complete_sums(from_state, sums)
        return sums, out, *after.tensors()[:4], *absorbed.tensors()[:4]

    assert_like_torch(few(20, gate=gate, scale=False, state=True), parts)


def test_no_order_of_sums_is_left_open(monkeypatch):
    """What torch does around the kernels adds in one order on a GPU, of one head too, and so do the kernels."""
    monkeypatch.setattr(fixed_order, "ONE_BLOCK", 1)
    inputs = few(20, gate=True, scale=True, state=True)
    one = {name: t[:1] if name == "w" else t[:, :1] for name, t in inputs.replicated.items()}
    (q, k, v), kwargs = Inputs({n: t[:, :1] for n, t in inputs.sequence.items()}, one).leaves().arguments()
    kwargs = {name: moved(x) for name, x in kwargs.items()} | {"implementation": "triton"}
    with fixed_order.FixedOrder():
        for causal, documents in ((True, ()), (True, (5, 6)), (False, ())):
            out, _ = linear_attention(moved(q), moved(k), moved(v), causal=causal, documents=documents, **kwargs)
            out.sum().backward()
        call = LinearCall(moved(q), moved(k), moved(v), **kwargs)
        (complete_sums(call, local_sums(replace(call, state=None))[0]).sum() + absorb(call).s_BHMV.sum()).backward()
    sources = list(Path(triton_full.__file__).parents[1].rglob("triton*.py"))
    assert len(sources) >= 10
    assert not any("atomic" in path.read_text() for path in sources)


def test_a_closed_gate_leaves_nothing():
    """Log gates of -inf cut off all that is older, without a NaN, in the state that keys leave behind."""
    inputs = few(20, gate=True, scale=False, state=True)
    inputs.sequence["log_gate"][:, :, 11] = float("-inf")
    (_, k, v), kwargs = inputs.arguments()
    want = absorb_keys(k, v, implementation="streaming", **kwargs)
    got = absorb_keys(moved(k), moved(v), implementation="triton", **{n: moved(x) for n, x in kwargs.items()})
    assert_close(got.s_BHMV.cpu(), want.s_BHMV, kind="state")
    assert_close(got.mass_BH.cpu(), want.mass_BH, kind="state")


def test_second_derivatives():
    """A backward pass that is differentiated again gives the streaming form's second derivatives, of both passes."""
    (q, k, v), kwargs = few(5, gate=False, scale=False, state=True).arguments()
    found = []
    for implementation, cast in (("streaming", lambda x: x), ("triton", moved)):
        leaves = [cast(x).clone().requires_grad_() for x in (q, k)]
        options = {"feature_map": cast(kwargs["feature_map"]), "implementation": implementation}
        out, _ = linear_attention(*leaves, cast(v), causal=False, **options)
        call = LinearCall(*leaves, cast(v), **options)
        more = complete_sums(replace(call, state=cast(kwargs["state"])), local_sums(call)[0])
        firsts = torch.autograd.grad(out.square().sum() + more.square().sum(), leaves, create_graph=True)
        seconds = torch.autograd.grad(sum(first.square().sum() for first in firsts), leaves)
        found.append([t.cpu() for t in seconds])
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.skipif(DEVICE != "cpu", reason="simulated ranks are of the CPU")
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_ranks_with_kernels_equal_one_without(kind, monkeypatch):
    """Three ranks that compute by kernels, one without tokens, give the outputs and gradients of one that does not."""
    _, kwargs = few(12, gate=True, scale=True, state=False).arguments()

    def call(ops, leaves, start, stop):
        cut = {name: t[:, :, start:stop] if isinstance(t, torch.Tensor) else t for name, t in kwargs.items()}
        return ops.linear_attention(*leaves, causal=kind == "causal", **cut)[0]

    check_ranks_with_kernels(call, monkeypatch)


def check_ranks_with_kernels(call, monkeypatch):
    """What `test_ranks_with_kernels_equal_one_without` says, of `call(ops, [q, k, v], start, stop)`."""
    one_at_a_time(monkeypatch)
    (q, k, v), _ = few(12, gate=True, scale=True, state=False).arguments()
    weight = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))

    def attend(ops, start, stop):
        leaves = [t[:, :, start:stop].clone().requires_grad_() for t in (q, k, v)]
        out = call(ops, leaves, start, stop)
        (out * weight[:, :, start:stop]).sum().backward()
        return out, *(leaf.grad for leaf in leaves)

    layout = SequenceLayout.from_lengths([7, 0, 5])
    found = run_simulated(
        lambda comm: attend(ShardedSequenceOps(comm, layout, implementation="triton"), *layout.range(comm.rank)), 3
    )
    for parts, whole in zip(zip(*found, strict=True), attend(LocalSequenceOps(), 0, 12), strict=True):
        assert_close(torch.cat(parts, 2), whole, kind="gradient")

"""What C kernels of linear attention promise beside results: bits, NaN that stays where it is, graphs, memory."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.errors import ConfigError, ShapeError
from dist_attn.ops import Denominator, LinearState, Watch, absorb_keys, linear_attention, watching
from dist_attn.ops.c_call import BLOCK, CHUNK
from dist_attn.ops.linear_attention import LinearCall, OutputBuffers, attend, choose, complete_sums, local_sums
from dist_attn.ops.linear_attention.native_call import NativeCall, kernels
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.native import Case, by_kernels, needs_kernels
from tests.support.pairs import each_pair

pytestmark = needs_kernels

NAMES = ["streaming", "native"]


def all_results(case, **options):
    """Output, state and gradients of the kernels, as one list."""
    leaves = case.leaves()
    args, kwargs = case.arguments(leaves)
    out, after = by_kernels(*args, **kwargs, **options)
    weighted_sum(out, *after.tensors()[:3]).backward()
    return [out, *after.tensors(), *(t.grad for t in leaves.values())]


def test_the_number_of_threads_changes_no_bit():
    """Outputs, states and gradients with one, two and five threads are the same bits."""
    case = Case(300, gate=True, scale=True, state=True, heads=3)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(all_results(case))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_batch_changes_no_bit():
    """Each sequence of a batch has the outputs, states and gradients that it has alone."""
    case = Case(200, gate=True, scale=True, batch=3)
    leaves = case.leaves()
    args, kwargs = case.arguments(leaves)
    out, after = by_kernels(*args, **kwargs)
    grads = torch.autograd.grad(out.sum() + after.s_BHMV.sum(), [leaves[name] for name in case.sequence])
    for row in range(3):
        alone = {name: t[row : row + 1].detach().requires_grad_() for name, t in leaves.items() if name != "w"}
        args, kwargs = case.arguments({**alone, "w": leaves["w"]})
        one, one_after = by_kernels(*args, **kwargs)
        assert torch.equal(one[0], out[row])
        assert torch.equal(one_after.s_BHMV[0], after.s_BHMV[row])
        own = torch.autograd.grad(one.sum() + one_after.s_BHMV.sum(), [alone[name] for name in case.sequence])
        assert all(torch.equal(a[0], b[row]) for a, b in zip(own, grads, strict=True))


@pytest.mark.parametrize("gate", [False, True])
def test_packing_changes_no_bit(gate):
    """A document has the outputs that it has alone, wherever in a packed row it lies."""
    case = Case(300, gate=gate, scale=gate, batch=1)
    starts = (0, 70, 71, 200)
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    packed, after = by_kernels(*args, **kwargs, documents=starts)
    for start, stop in zip(starts, (*starts[1:], 300), strict=True):
        part = {name: t[:, :, start:stop] for name, t in case.sequence.items()}
        args, kwargs = case.arguments({**part, **case.shared})
        alone, alone_after = by_kernels(*args, **kwargs)
        assert torch.equal(packed[:, :, start:stop], alone)
    assert torch.equal(after.s_BHMV, alone_after.s_BHMV)


def test_later_tokens_change_no_bit():
    """Replacing a token leaves every earlier output bitwise the same."""
    case = Case(200, gate=True)
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    before, _ = by_kernels(*args, **kwargs)
    changed = [x.clone() for x in args]
    changed[1][:, :, 137], changed[2][:, :, 137] = 1.0, -3.0
    after, _ = by_kernels(*changed, **kwargs)
    assert torch.equal(before[:, :, :137], after[:, :, :137])
    assert not torch.equal(before[:, :, 137:], after[:, :, 137:])


@pytest.mark.parametrize("name", ["q", "k", "v", "log_gate", "key_scale"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_wrong_in_a_document_stays_there(name, wrong):
    """NaN and infinity in one document reach no output, state or gradient of the documents beside it."""
    case = Case(150, gate=True, scale=True, batch=1)
    found = []
    for value in (None, wrong):
        leaves = case.leaves()
        if value is not None:
            leaves[name].data[:, :, 60] = value
        args, kwargs = case.arguments(leaves)
        out, after = by_kernels(*args, **kwargs, documents=(40, 90))
        (out[:, :, :40].sum() + out[:, :, 90:].sum() + after.s_BHMV.sum()).backward()
        found.append((out, after, leaves))
    (want, want_after, want_leaves), (out, after, leaves) = found
    assert not bool(out[:, :, 60:90].isfinite().all())
    assert torch.equal(out[:, :, :40], want[:, :, :40])
    assert torch.equal(out[:, :, 90:], want[:, :, 90:])
    assert torch.equal(after.s_BHMV, want_after.s_BHMV)
    for key in case.sequence:
        assert torch.equal(leaves[key].grad[:, :, :40], want_leaves[key].grad[:, :, :40])
        assert torch.equal(leaves[key].grad[:, :, 90:], want_leaves[key].grad[:, :, 90:])


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    each_pair(("gaussian_unit", "elu", "arc_cosine"), "qk", (float("nan"), float("inf"), float("-inf"), 1e30)),
)
def test_numbers_that_are_wrong_show_where_the_streaming_form_shows_them(kind, name, wrong):
    """NaN, infinities and huge numbers in queries and keys make the same outputs not finite."""
    case = Case(150, kind=kind, sizes=(8, 5, 6))
    case.sequence[name][0, 0, 64, 2] = wrong
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    want, got = (linear_attention(*args, **kwargs, implementation=by)[0] for by in NAMES)
    assert torch.equal(want.isfinite(), got.isfinite())
    assert torch.equal(want.isnan(), got.isnan())


@pytest.mark.parametrize("token", [0, 5, 63, 64])
def test_a_gate_that_is_nan_shows_where_a_state_is_read(token):
    """Sums are completed with NaN from the token on whose gate is NaN, as in the streaming form."""
    case = Case(130, gate=True, state=True)
    case.sequence["log_gate"][:, :, token] = float("nan")
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    sums = torch.ones(2, 2, 130, 6)
    want, got = (complete_sums(LinearCall(*args, **kwargs, implementation=by), sums) for by in NAMES)
    assert torch.equal(want.isnan(), got.isnan())
    assert bool(got[:, :, token:].isnan().all())


@pytest.mark.parametrize("policy", ["floor", "exact", "clamp", "sign_clamp", "abs_clamp", "mass", "one"])
def test_a_watch_counts_what_the_streaming_form_counts(policy):
    """Guarded denominators per head, of attention, of reads and of completed sums, are as many."""
    case = Case(100, state=True)
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    counted = []
    for by in NAMES:
        watch, given = Watch(), {"denominator": Denominator(policy, 0.5), "implementation": by}
        with watching(watch):
            linear_attention(*args, **kwargs, **given)
            linear_attention(*args, **kwargs, causal=False, **given)
            call = LinearCall(*args, **kwargs, **given)
            complete_sums(call, local_sums(replace(call, state=None))[0])
        counted.append((watch.denominators, watch.guarded))
    assert counted[0] == counted[1]
    assert policy not in ("floor", "clamp") or sum(counted[0][1][0]) > 0


def test_a_compiled_graph_takes_the_streaming_form():
    """Under torch.compile nothing of the kernels is traced: results are those of the streaming form."""
    case = Case(20, batch=1)
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    chosen = []

    def attend(q, k, v):
        chosen.append(choose(LinearCall(q, k, v)).implementation)
        return linear_attention(q, k, v, **kwargs)[0]

    got = torch.compile(attend, backend="eager")(*args)
    assert_close(got, attend(*args))
    assert chosen[0] == "streaming"
    assert chosen[-1] == "native"


def test_threads_attend_at_once():
    """Ranks as threads, forward and backward at the same time, each get what they get alone."""
    cases = [Case(200 + n, gate=True, scale=True, state=True, seed=n) for n in range(6)]
    alone = [all_results(case) for case in cases]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            for want, got in zip(alone, pool.map(all_results, cases), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "w", "s", "mass", "log_gate", "key_scale z"])
def test_gradients_where_only_some_are_wanted(wanted):
    """Whatever leaves want gradients get those that they get among others."""
    case = Case(140, kind="gaussian_unit", gate=True, scale=True, state=True, batch=1)
    found = []
    wanted = wanted.split()
    for names in ([*case.sequence, *case.shared], wanted):
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in case.leaves().items()}
        args, kwargs = case.arguments(leaves)
        out, after = by_kernels(*args, **kwargs)
        found.append(torch.autograd.grad(weighted_sum(out, *after.tensors()[:3]), [leaves[name] for name in wanted]))
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("changed", ["v", "out"])
def test_what_is_needed_again_must_not_change(changed):
    """Inputs and outputs that are changed in place before the backward pass are an error there, not wrong gradients."""
    case = Case(20)
    leaves = case.leaves()
    values = leaves["v"] * 1
    args, kwargs = case.arguments({**leaves, "v": values})
    out, _ = by_kernels(*args, **kwargs)
    (values if changed == "v" else out).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_and_passes_in_inference_mode():
    """Hooks see and change gradients; in inference mode the same bits come out."""
    case = Case(70, gate=True)
    leaves = case.leaves()
    args, kwargs = case.arguments(leaves)
    out, _ = by_kernels(*args, **kwargs)
    want = torch.autograd.grad(out.sum(), leaves["k"], retain_graph=True)[0]
    leaves["k"].register_hook(lambda gradient: 2 * gradient)
    out.sum().backward()
    assert torch.equal(leaves["k"].grad, 2 * want)
    with torch.inference_mode():
        assert torch.equal(by_kernels(*args, **kwargs)[0], out)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux, which tells and resets the peak")
def test_memory_is_freed_and_does_not_grow_with_the_length():
    """A pass holds outputs and gradients of the sequence's length and nothing more, and none of it afterwards."""
    phi = feature_maps.Gaussian(torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)))

    def kib(name):
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    def peak_mib(length, passes):
        q, k, v = (torch.ones(1, 2, length, 32, requires_grad=True) for _ in range(3))
        Path("/proc/self/clear_refs").write_text("5")  # the largest size so far, of other tests, is forgotten
        start = kib("VmRSS")
        for _ in range(passes):
            buffers = OutputBuffers(torch.empty(1, 2, length, 32))
            attend(LinearCall(q, k, v, feature_map=phi, implementation="native", buffers=buffers))[0].sum().backward()
        return (kib("VmHWM") - start) / 1024 / (4 * q.numel() / 2**20)

    peak_mib(2048, 1)
    gc.disable()
    try:
        # In outputs of 16 MiB: itself and its gradient, three gradients twice; six that were not freed would be more.
        # What the allocator holds of other tests only adds.
        assert min(peak_mib(65_536, 6) for _ in range(3)) < 12
    finally:
        gc.enable()


def test_working_space_grows_by_levels():
    """What the backward pass works in has room for a further level of states where parts of parts are not enough."""
    parts, chunks = 16, BLOCK * 16**5
    call = NativeCall(1, 1, CHUNK * chunks, 1024, 1024, projections=1024, features=1024, num_chunks=chunks)
    state = kernels().dist_attn_state_floats(byref(call))
    least = kernels().dist_attn_backward_floats(byref(call))
    call.num_chunks += 1
    assert kernels().dist_attn_backward_floats(byref(call)) == least + parts * state
    call.num_chunks = chunks // 16
    assert kernels().dist_attn_backward_floats(byref(call)) == least


def test_sizes_that_do_not_fit_are_refused():
    """What would lead the kernels outside a tensor is an error in words, as in the streaming form."""
    case = Case(20, gate=True, state=True)
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    state, w = kwargs["state"], kwargs["feature_map"].w_HDK
    for wrong in (w[:1], w[..., :3], w[0]):
        wrong_map = {**kwargs, "feature_map": feature_maps.Gaussian(wrong)}
        with pytest.raises(ShapeError):
            linear_attention(*args, **wrong_map)
        with pytest.raises(ConfigError, match="feature map's tensor"):
            by_kernels(*args, **wrong_map)
    wrong_states = [replace(state, z_BHM=state.z_BHM[..., 1:]), replace(state, mass_BH=state.mass_BH[:1])]
    wrong_states += [LinearState.identity(2, 2, 5, 4), LinearState.identity(2, 2, 12, 3)]
    for wrong_state in wrong_states:
        for keys in (20, 0):
            with pytest.raises(ShapeError, match="the state"):
                cut = (args[0], args[1][:, :, :keys], args[2][:, :, :keys])
                by_kernels(*cut, feature_map=kwargs["feature_map"], state=wrong_state, causal=False)
        with pytest.raises(ShapeError, match="the state"):
            absorb_keys(*args[1:], feature_map=kwargs["feature_map"], state=wrong_state, implementation="native")
    sums = torch.ones(2, 2, 20, 6)
    call = LinearCall(*args, feature_map=kwargs["feature_map"], state=state, implementation="native")
    with pytest.raises(ShapeError, match="sums is"):
        complete_sums(call, sums[:, :, 1:])
    with pytest.raises(ShapeError, match="log_gate is"):
        complete_sums(replace(call, log_gate_BHS=torch.zeros(2, 2, 19)), sums)
    with pytest.raises(ConfigError, match=r"the state is torch.float64"):
        by_kernels(*args, **{**kwargs, "state": replace(state, mass_BH=state.mass_BH.double())})

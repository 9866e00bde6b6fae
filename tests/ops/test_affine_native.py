"""C kernels of affine recurrences against the oracle in float64: outputs, states and every gradient."""

import gc
import resource
from ctypes import byref
from dataclasses import replace

import pytest
import torch

from dist_attn.errors import ConfigError
from dist_attn.ops import AffineState, LocalSequenceOps, affine_recurrence
from dist_attn.ops.affine import AffineCall, absorb
from dist_attn.ops.affine.implementation import choose, why_no_library
from dist_attn.ops.affine.native import NativeRecurrence, kernels
from dist_attn.ops.c_call import BLOCK, CHUNK
from dist_attn.ops.state import steps_in_place
from tests.support.affine import KINDS, AffineInputs
from tests.support.attention import weighted_sum
from tests.support.pairs import each_pair

_why_not = why_no_library()
pytestmark = pytest.mark.skipif(_why_not is not None, reason=f"needs C kernels: {_why_not}")

NATIVE, STREAMING = LocalSequenceOps(implementation="native"), LocalSequenceOps(implementation="streaming")
ALL_KINDS = [*KINDS, "erasing, read before"]


def random_inputs(kind, tokens, *, channels=False, sizes=(1, 2, 20, 12), dtype=torch.float32, closed=True, seed=0):
    """Those of `AffineInputs`, and an erasure beside a bonus."""
    plain = kind.removesuffix(", read before") if kind.startswith("erasing") else kind
    options = {"channels": channels, "sizes": sizes, "dtype": dtype, "closed": closed, "seed": seed}
    inputs = AffineInputs.random(plain, tokens, **options)
    if plain != kind:
        inputs.replicated["bonus"] = torch.linspace(-1.0, 1.0, sizes[1] * sizes[2]).view(sizes[1], sizes[2])
    return inputs


def widened(inputs):
    """The same numbers in float64."""
    double = ({name: t.detach().double() for name, t in part.items()} for part in (inputs.sequence, inputs.replicated))
    return AffineInputs(inputs.kind, *double)


def with_gradients(inputs, run):
    """Outputs, the state after and the gradients of all tensors, by their names."""
    leaves = AffineInputs(
        inputs.kind,
        {name: t.detach().requires_grad_() for name, t in inputs.sequence.items()},
        {name: t.detach().requires_grad_() for name, t in inputs.replicated.items()},
    )
    out, after = run(leaves)
    weighted_sum(out, after.s_BHKV).backward()
    return {"out": out, "state after": after.s_BHKV, **leaves.gradients()}


def assert_near(got, want, *, output=1e-5, gradient=1e-4):
    """Fail unless all is as near as float32 sums come, next to the largest number of each tensor."""
    for name, right in want.items():
        assert got[name].isfinite().all(), name
        bound = output if name in ("out", "state after") else gradient
        assert (got[name].double() - right).abs().max() <= bound * right.abs().max().clamp_min(1e-3), name


def assert_like_the_oracle(inputs, documents=(), **bounds):
    """Fail unless outputs, the state after and all gradients are those of the loop over tokens in float64."""
    want = with_gradients(widened(inputs), lambda x: x.naive(documents))
    ops = LocalSequenceOps(documents, "native") if documents else NATIVE
    assert_near(with_gradients(inputs, lambda x: x.run(ops)), want, **bounds)


@pytest.mark.parametrize(
    ("kind", "channels", "tokens"), each_pair(ALL_KINDS, (False, True), (1, 15, 16, 63, 64, 65, 200))
)
def test_every_length(kind, channels, tokens):
    """Lengths around stripes and chunks, with a closed gate, are the oracle's."""
    assert_like_the_oracle(random_inputs(kind, tokens, channels=channels))


@pytest.mark.parametrize(
    ("kind", "channels", "sizes", "tokens"),
    each_pair(ALL_KINDS, (False, True), ((1, 1, 1, 1), (1, 1, 3, 40), (2, 1, 40, 3), (1, 1, 128, 128)), (1, 67)),
)
def test_every_size(kind, channels, sizes, tokens):
    """Key sizes and values of any number are the oracle's, of a single token too."""
    assert_like_the_oracle(random_inputs(kind, tokens, channels=channels, sizes=sizes))


@pytest.mark.parametrize(
    ("kind", "channels", "documents"), each_pair(ALL_KINDS, (False, True), ((0,), (0, 1, 2), (5, 6, 70, 134)))
)
def test_documents_do_not_see_each_other(kind, channels, documents):
    """Packed documents, also of one token, are the oracle's; before the first start the state goes on."""
    assert_like_the_oracle(random_inputs(kind, 135, channels=channels), documents)


@pytest.mark.parametrize(
    ("kind", "channels", "closed"), each_pair(ALL_KINDS, (False, True), (-torch.inf, -104.0, -1000.0, -60.0, 0.0))
)
def test_closed_gates_leave_nothing(kind, channels, closed):
    """Strong decays in a row, between others and none at all give no NaN, and closed gates have no gradient."""
    inputs = random_inputs(kind, 140, channels=channels, closed=False)
    for at in (0, 9, 10, 63, 64, 100, *range(110, 130)):
        inputs.sequence["log_decay"][:, :, at] = closed
    assert_like_the_oracle(inputs)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_decays_of_both_kinds_agree(kind):
    """A decay that is the same for all channels is the scalar one, also where it is strong and then weak."""
    inputs = random_inputs(kind, 130, sizes=(1, 1, 20, 12))
    inputs.sequence["log_decay"][:, :, 7:60] = -50.0
    want, _ = inputs.run(NATIVE)
    inputs.sequence["log_decay"] = inputs.sequence["log_decay"].expand(-1, -1, -1, 20)
    got, _ = inputs.run(NATIVE)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def heads_in_a_token(x):
    """[B, L, H, K] in memory, as projections of a model give it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_wider(x):
    """Rows that begin anywhere in memory, and between numbers that are not to be read."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    wide[..., 1:-2:2] = x
    return wide[..., 1:-2:2]


@pytest.mark.parametrize("layout", [heads_in_a_token, part_of_wider])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_tensors_may_lie_anyhow(kind, layout):
    """Views of every layout give the oracle's results."""
    inputs = random_inputs(kind, 70, channels=True)
    assert_like_the_oracle(replace(inputs, sequence={name: layout(t) for name, t in inputs.sequence.items()}))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_half_precision(kind, channels):
    """bfloat16 inputs come within their own precision of the oracle on the same numbers, from a float32 state."""
    inputs = random_inputs(kind, 130, channels=channels, dtype=torch.bfloat16, closed=False)
    assert_like_the_oracle(inputs, output=2e-2, gradient=5e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_another_type(kind):
    """Decays in float32 beside bfloat16 tokens are read as what they are; gradients keep the types."""
    inputs = random_inputs(kind, 70, dtype=torch.bfloat16)
    inputs.sequence["log_decay"] = inputs.sequence["log_decay"].float()
    got = with_gradients(inputs, lambda x: x.run(NATIVE))
    assert {name: got[name].dtype for name in inputs.tensors} == {name: t.dtype for name, t in inputs.tensors.items()}


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_absorbed_tokens(kind, channels):
    """What a stretch leaves and does to a state before it, with gradients, is what its tokens do one by one."""
    inputs = random_inputs(kind, 90, channels=channels)

    def joined(x):
        t, state = x.sequence, AffineState(x.replicated["state"])
        erase = (t["a"], t["b"]) if "a" in t else None
        call = AffineCall(t["q"], t["k"], t["v"], t["log_decay"], erase, t.get("beta"), implementation="native")
        return t["v"], state.combine(absorb(call.part(0, 40))).combine(absorb(call.part(40, 90)))

    want = with_gradients(widened(inputs), lambda x: (x.sequence["v"], x.naive()[1]))
    assert_near(with_gradients(inputs, joined), want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_sequence_goes_back_by_stretches(kind):
    """Where blocks outnumber the states that are kept, gradients are those of the streaming form."""
    inputs = random_inputs(kind, CHUNK * BLOCK * 18 + 5, sizes=(1, 1, 4, 3))
    want = with_gradients(widened(inputs), lambda x: x.run(STREAMING))
    assert_near(with_gradients(inputs, lambda x: x.run(NATIVE)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    """The gradient of the squared gradient is that of the streaming form."""
    inputs = random_inputs(kind, 20, channels=True, sizes=(1, 2, 4, 3))
    found = []
    for ops in (STREAMING, NATIVE):
        leaves = inputs.leaves()
        tensors = list(leaves.tensors.values())
        out, after = leaves.run(ops)
        first = torch.autograd.grad(weighted_sum(out, after.s_BHKV), tensors, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        found.append(torch.autograd.grad(penalty, tensors, allow_unused=True, materialize_grads=True))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_what_is_wrong_in_a_document_stays_there(kind, wrong):
    """NaN and infinity in one document reach no output, state or gradient of the documents beside it."""
    for spoiled in random_inputs(kind, 1).sequence:
        found = []
        for value in (None, wrong):
            inputs = random_inputs(kind, 150, channels=True, sizes=(1, 1, 6, 5))
            if value is not None:
                inputs.sequence[spoiled][:, :, 60] = value
            leaves = inputs.leaves()
            out, after = leaves.run(LocalSequenceOps((40, 90), "native"))
            (out[:, :, :40].sum() + out[:, :, 90:].sum() + after.s_BHKV.sum()).backward()
            found.append([out, *(t.grad for t in leaves.sequence.values())])
        for want, got in zip(*found, strict=True):
            assert torch.equal(got[:, :, :40], want[:, :, :40]), spoiled
            assert torch.equal(got[:, :, 90:], want[:, :, 90:]), spoiled


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_chunks_are_by_themselves(kind):
    """Neither threads, nor other heads, nor a cut between chunks, nor later tokens change a bit."""
    inputs = random_inputs(kind, 64 * 4 + 9, channels=True, sizes=(2, 2, 20, 12))
    x, s = inputs.sequence, inputs.replicated["state"]
    out, after = inputs.run(NATIVE)
    alone = replace(inputs, sequence={name: t[1:] for name, t in x.items()})
    alone.replicated["state"] = s[1:]
    assert torch.equal(alone.run(NATIVE)[0], out[1:])
    inputs.replicated["state"] = s
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        assert torch.equal(inputs.run(NATIVE)[0], out)
    finally:
        torch.set_num_threads(threads)
    first, state = replace(inputs, sequence={name: t[:, :, :128] for name, t in x.items()}).run(NATIVE)
    rest = replace(inputs, sequence={name: t[:, :, 128:] for name, t in x.items()})
    rest.replicated["state"] = state.s_BHKV
    later, last = rest.run(NATIVE)
    assert torch.equal(torch.cat([first, later], 2), out) and torch.equal(last.s_BHKV, after.s_BHKV)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_step_may_write_over_its_state(kind):
    """One token where steps are in place: the same bits, in the memory of the state before; several take new memory."""
    for tokens in (1, 2):
        inputs = random_inputs(kind, tokens, channels=True)
        out, after = inputs.run(NATIVE)
        state = inputs.replicated["state"] = inputs.replicated["state"].clone()
        with torch.no_grad(), steps_in_place():
            out_again, written = inputs.run(NATIVE)
        assert torch.equal(out_again, out) and torch.equal(written.s_BHKV, after.s_BHKV)
        assert (written.s_BHKV.data_ptr() == state.data_ptr()) == (tokens == 1)


def test_memory_does_not_grow_with_the_length():
    """Forward and backward hold outputs and gradients and nothing more of the sequence's length."""
    call = NativeRecurrence(1, 1, 2**20, 128, 128, 128, num_chunks=2**14)
    whole = kernels().dist_attn_backward_floats(byref(call)), kernels().dist_attn_forward_floats(byref(call))
    call.tokens, call.num_chunks = 2**13, 2**7
    assert whole == (kernels().dist_attn_backward_floats(byref(call)), kernels().dist_attn_forward_floats(byref(call)))

    def peak(length):
        x = [torch.ones(1, 1, length, 16, requires_grad=True) for _ in range(3)]
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        decay = torch.full((1, 1, 1, 1), -0.1).expand(1, 1, length, 1)
        affine_recurrence(*x, log_decay_BHLK=decay, implementation="native")[0].sum().backward()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / (64 * length / 1024)

    peak(2048)
    gc.collect()
    assert peak(2**17) < 8  # tensors of the length: outputs and their gradient, three gradients


def test_what_takes_a_call():
    """On a CPU "auto" takes the kernels for float32 and bfloat16; by name they refuse the rest in words."""
    inputs = random_inputs("delta rule", 3)
    x = inputs.sequence
    call = AffineCall(x["q"], x["k"], x["v"], x["log_decay"], beta_BHL=x["beta"])
    assert choose(call).implementation == "native"
    assert choose(replace(call, implementation="streaming")).implementation == "streaming"
    refused = {
        "float64": call.with_sequence(tuple(None if t is None else t.double() for t in call.sequence)),
        "meta": call.with_sequence(tuple(None if t is None else t.to("meta") for t in call.sequence)),
        "the state is": replace(call, state=AffineState(torch.zeros(1, 2, 20, 12, dtype=torch.bfloat16))),
        "an erasure and a beta": replace(call, erase=(x["k"], x["k"])),
        "1 to 1024": replace(call, v_BHLV=torch.zeros(1, 2, 3, 1025)),
    }
    for words, other in refused.items():
        assert choose(other).implementation == "streaming"
        with pytest.raises(ConfigError, match=words):
            choose(replace(other, implementation="native"))


def test_compiled_graphs_take_the_streaming_form(monkeypatch):
    """Where a call is being compiled the kernels are not for it."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = random_inputs("decay", 3).sequence
    assert choose(AffineCall(x["q"], x["k"], x["v"], x["log_decay"])).implementation == "streaming"

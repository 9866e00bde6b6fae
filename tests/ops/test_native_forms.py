"""Absorbed keys, sums in two parts, chunks and second derivatives by the C kernels of linear attention."""

from dataclasses import replace

import pytest
import torch

from dist_attn.ops import Denominator, absorb_keys, linear_attention
from dist_attn.ops.linear_attention import (
    LinearCall,
    OutputBuffers,
    attend,
    complete_sums,
    linear_attention_naive,
    local_sums,
    tokens_until_forgotten,
)
from dist_attn.ops.linear_attention.attention import absorb_by_chunks, attend_by_chunks, read_by_chunks
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.native import Case, assert_like_the_oracle, by_kernels, needs_kernels
from tests.support.pairs import each_pair

pytestmark = needs_kernels

KINDS = ["gaussian_unit", "arc_cosine", "elu", "none"]


def in_two_parts(q, k, v, *, feature_map, log_gate_BHS, key_scale_BHS, state, denominator=None, documents=()):
    """Outputs and the state after the last key, as ranks compute them."""
    call = LinearCall(
        q, k, v, log_gate_BHS, key_scale_BHS, feature_map=feature_map, documents=documents, implementation="native"
    )
    sums, segment = local_sums(call)
    return complete_sums(replace(call, state=state, denominator=denominator), sums), state.combine(segment)


def absorbed(q, k, v, *, documents=(), **kwargs):
    """No outputs, and the state that the keys leave behind."""
    return v.new_zeros(0), absorb_keys(k, v, **kwargs, documents=documents, implementation="native")


def naive_absorbed(q, k, v, **kwargs):
    """The oracle's state."""
    return v.new_zeros(0), linear_attention_naive(q, k, v, **kwargs)[1]


@pytest.mark.parametrize(("tokens", "kind", "gate"), each_pair((1, 64, 100), KINDS, (False, True)))
def test_absorbed_keys(tokens, kind, gate):
    """The state of the keys alone, and every gradient through it, equal the oracle's."""
    case = Case(tokens, kind=kind, gate=gate, scale=gate, state=gate)
    assert_like_the_oracle(case, oracle=naive_absorbed, kernels=absorbed)


def test_absorbed_keys_of_documents():
    """With documents it is the state of the last one alone."""
    case = Case(100, gate=True, scale=True)
    assert_like_the_oracle(case, oracle=naive_absorbed, kernels=absorbed, documents=(3, 70))


@pytest.mark.parametrize(
    ("tokens", "strength", "policy"), each_pair((1, 100, 200), (0.0, 0.01, 1.0, 30.0), ("floor", "mass"))
)
def test_two_parts_are_the_whole(tokens, strength, policy):
    """Sums from nothing, completed by the state before, equal the oracle's, whether gates keep that state or not."""
    gate = strength > 0
    case = Case(tokens, kind="gaussian_unit", gate=gate, scale=gate, state=True)
    if gate:
        case.sequence["log_gate"] *= strength
    assert_like_the_oracle(case, kernels=in_two_parts, denominator=Denominator(policy, 0.3))


def test_sums_of_documents_are_their_own():
    """Sums, denominators and masses of packed documents, and their gradients, are the streaming form's."""
    case = Case(150, gate=True, scale=True)
    found = []
    for by in ("streaming", "native"):
        leaves = case.leaves()
        (q, k, v), kwargs = case.arguments(leaves)
        sums, after = local_sums(LinearCall(q, k, v, **kwargs, documents=(0, 1, 90), implementation=by))
        weighted_sum(sums, *after.tensors()[:3]).backward()
        found.append((sums, leaves))
    assert_close(found[1][0], found[0][0])
    for name, leaf in found[1][1].items():
        assert_close(leaf.grad, found[0][1][name].grad, kind="gradient", what=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_completed_sums_have_the_type_that_is_asked_for(dtype):
    """Also one that the kernels do not write themselves."""
    case = Case(70, state=True)
    (q, k, v), kwargs = case.arguments({**case.sequence, **case.shared})
    call = LinearCall(q, k, v, **kwargs, implementation="native")
    sums, _ = local_sums(replace(call, state=None))
    got, want = (
        complete_sums(replace(call, v_BHSV=v.to(dtype), implementation=by), sums) for by in ("native", "streaming")
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_outputs_go_where_they_are_wanted():
    """Given room, attention and completed sums are written there, also into a part of something longer."""
    case = Case(70, gate=True, state=True)
    args, kwargs = case.arguments({**case.sequence, **case.shared})
    whole = torch.full((2, 2, 200, 4), float("nan"))
    want, _ = by_kernels(*args, **kwargs)
    got, _ = attend(LinearCall(*args, **kwargs, implementation="native", buffers=OutputBuffers(whole[:, :, 100:170])))
    assert got.data_ptr() == whole[:, :, 100:].data_ptr()
    assert torch.equal(whole[:, :, 100:170], want)
    assert bool(whole[:, :, :100].isnan().all() & whole[:, :, 170:].isnan().all())


@pytest.mark.parametrize("strength", [1e-3, 0.5, 30.0])
def test_where_a_state_is_forgotten(strength):
    """Behind the tokens until which a state counts, completing adds nothing: no bit changes without the state."""
    case = Case(300, gate=True, state=True)
    case.sequence["log_gate"] = torch.full_like(case.sequence["log_gate"], -strength)
    (q, k, v), kwargs = case.arguments({**case.sequence, **case.shared})
    call = LinearCall(q, k, v, **kwargs, implementation="native")
    sums, _ = local_sums(replace(call, state=None))
    known = tokens_until_forgotten(kwargs["log_gate_BHS"], 300)
    assert known == {1e-3: 300, 0.5: 175, 30.0: 3}[strength]
    out = complete_sums(call, sums)
    alone, _ = linear_attention(q, k, v, **{**kwargs, "state": None}, implementation="native")
    assert_close(out[:, :, known:], alone[:, :, known:])
    assert strength > 1 or not torch.allclose(out[:, :, 0], alone[:, :, 0])


@pytest.mark.parametrize("cut", [64, 128, 192])
@pytest.mark.parametrize("gate", [False, True])
def test_chunk_by_chunk_a_cut_changes_no_bit(cut, gate):
    """Attention in calls that are cut between chunks, and absorbed keys, have the bits of one call."""
    case = Case(250, gate=gate, scale=gate, state=True)

    def part(start, stop, state):
        tensors = {name: t[:, :, start:stop] for name, t in case.sequence.items()}
        (q, k, v), kwargs = case.arguments({**tensors, **case.shared})
        call = LinearCall(q, k, v, **kwargs, implementation="native")
        out, after = attend_by_chunks(call, state)
        same = absorb_by_chunks(call, state)
        assert all(torch.equal(a, b) for a, b in zip(after.tensors(), same.tensors(), strict=True))
        return out, after, read_by_chunks(call, state)

    before = case.arguments({**case.sequence, **case.shared})[1]["state"]
    whole, after, read = part(0, 250, before)
    first, between, first_read = part(0, cut, before)
    rest, end, _ = part(cut, 250, between)
    assert torch.equal(torch.cat([first, rest], 2), whole)
    assert torch.equal(first_read, read[:, :, :cut])
    assert all(torch.equal(a, b) for a, b in zip(end.tensors(), after.tensors(), strict=True))


@pytest.mark.parametrize("options", [{}, {"documents": (3, 20)}, {"causal": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(options, kind):
    """Gradients of a norm of gradients are the streaming form's, of every input, through outputs and states."""
    case = Case(30, kind=kind, gate=True, scale=True, state=True, batch=1)
    found = []
    for by in ("streaming", "native"):
        leaves = case.leaves()
        args, kwargs = case.arguments(leaves)
        out, after = linear_attention(*args, **kwargs, **options, implementation=by)
        loss = weighted_sum(out.square(), *after.tensors()[:3])
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        penalty = sum(gradient.square().mean() for gradient in first)
        found.append((first, torch.autograd.grad(penalty, list(leaves.values()), allow_unused=True)))
    for got, want, name in zip(found[1][0], found[0][0], leaves, strict=True):
        assert_close(got, want, kind="gradient", what=name)
    for got, want, name in zip(found[1][1], found[0][1], leaves, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert float((got - want).norm()) <= 1e-3 * float(want.norm()) + 1e-5, name


@pytest.mark.parametrize("part", ["absorbed", "completed"])
def test_second_derivatives_of_parts(part):
    """Absorbed keys and completed sums can be differentiated twice too."""
    case = Case(30, gate=True, scale=True, state=True, batch=1)
    found = []
    for by in ("streaming", "native"):
        leaves = case.leaves()
        (q, k, v), kwargs = case.arguments(leaves)
        if part == "absorbed":
            loss = weighted_sum(*(t.square() for t in absorb_keys(k, v, **kwargs, implementation=by).tensors()[:3]))
        else:
            call = LinearCall(q, k, v, **kwargs, implementation=by)
            loss = weighted_sum(complete_sums(call, local_sums(replace(call, state=None))[0]).square())
        names = [name for name in leaves if part == "completed" or name != "q"]
        inputs = [leaves[name] for name in names]
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().mean() for g in first), inputs))
    for got, want, name in zip(found[1], found[0], names, strict=True):
        assert float((got - want).norm()) <= 1e-3 * float(want.norm()), name


@pytest.mark.parametrize("strength", [1e-3, 30.0])
def test_a_gate_that_is_nan_forgets_nothing(strength):
    """Where one head's gates are spoilt nothing counts as forgotten from there on, whatever other heads' gates say."""
    gates = torch.full((1, 2, 300), -strength)
    gates[0, 0, 2:] = float("nan")
    assert tokens_until_forgotten(gates, 300) == 300
    gates[0, 1] = float("nan")
    assert tokens_until_forgotten(gates, 300) == 300

"""Affine recurrences in chunks against the oracle and the golden vectors; the state as a monoid; steps; refusals."""

from dataclasses import replace

import pytest
import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops import AffineState, LocalSequenceOps, affine_recurrence, affine_step, gated_delta_rule
from dist_attn.ops.affine import AffineCall, absorb, gated_delta_step, recur_by_chunks
from dist_attn.ops.state import steps_in_place
from tests.support.affine import KINDS, AffineInputs
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.pairs import each_pair

STREAMING = LocalSequenceOps(implementation="streaming")
GOLDEN = ("retention", "gla", "rwkv6", "gated_delta", "kda", "dplr")


def call_of(inputs: AffineInputs, documents: tuple[int, ...] = ()) -> AffineCall:
    """The call of these inputs, without the state before."""
    x = inputs.sequence
    erase = (x["a"], x["b"]) if "a" in x else None
    bonus = inputs.replicated.get("bonus")
    read = "after" if bonus is None else "before"
    call = AffineCall(x["q"], x["k"], x["v"], x["log_decay"], erase, x.get("beta"), bonus, read, documents=documents)
    return replace(call, implementation="streaming")


@pytest.mark.parametrize(("kind", "channels", "tokens"), each_pair(KINDS, (False, True), (0, 1, 7, 63, 64, 65, 650)))
def test_chunks_equal_the_oracle(kind: str, channels: bool, tokens: int) -> None:
    """Outputs, the state and all gradients, with a gate that is closed, are those of the loop over tokens."""
    inputs = AffineInputs.random(kind, tokens, channels=channels)
    results = []
    for run in (AffineInputs.naive, lambda x: x.run(STREAMING)):
        leaves = inputs.leaves()
        out, after = run(leaves)
        if tokens:
            weighted_sum(out, after.s_BHKV).backward()
        results.append((out, after.s_BHKV, leaves.gradients()))
    (want, want_state, want_gradients), (got, state, gradients) = results
    assert_close(got, want)
    assert_close(state, want_state, kind="state")
    for name, gradient in want_gradients.items():
        assert_close(gradients[name], gradient, kind="gradient", what=name)


def test_a_bonus_beside_an_erasure_is_of_what_is_written() -> None:
    """Read before its token, a state that is also erased from is the oracle's with the bonus of key and value."""
    inputs = AffineInputs.random("erasing", 70, channels=True)
    inputs.replicated["bonus"] = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(3, 8)
    assert_close(inputs.run(STREAMING)[0], inputs.naive()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_documents_begin_from_nothing(kind: str) -> None:
    """Each document is computed by itself; a number that is not finite in one of them stays in it."""
    documents = (3, 70, 71, 200)
    inputs = AffineInputs.random(kind, 210, channels=True)
    ops = LocalSequenceOps(documents, "streaming")
    want, want_state = inputs.naive(documents)
    out, state = inputs.run(ops)
    assert_close(out, want)
    assert_close(state.s_BHKV, want_state.s_BHKV, kind="state")
    inputs.sequence["v"][:, :, 72] = torch.nan
    spoiled, state = inputs.run(ops)
    assert torch.equal(spoiled[:, :, :71], out[:, :, :71]) and torch.equal(spoiled[:, :, 200:], out[:, :, 200:])
    assert state.s_BHKV.isfinite().all()


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_stretches_combine(kind: str, channels: bool) -> None:
    """What stretches do to a state joins associatively, and is what the tokens do one after the other."""
    inputs = AffineInputs.random(kind, 90, channels=channels, closed=False)
    whole, before = call_of(inputs), AffineState.from_sums(inputs.replicated["state"])
    parts = [absorb(whole.part(a, b)) for a, b in ((0, 20), (20, 20), (20, 75), (75, 90))]
    left = parts[0].combine(parts[1]).combine(parts[2]).combine(parts[3])
    right = parts[0].combine(parts[1].combine(parts[2].combine(parts[3])))
    want = inputs.naive()[1].s_BHKV
    for element in (left, right, absorb(whole)):
        assert_close(before.combine(element).s_BHKV, want, kind="state")
        transition = element.transition
        assert transition is not None
        kept = transition @ before.s_BHKV if element.change_BHKK is not None else 0
        if element.change_BHKK is None:
            kept = transition.reshape(*transition.shape[:2], -1, 1) * before.s_BHKV
        assert_close(kept + element.s_BHKV, want, kind="state")
    assert torch.equal(parts[0].combine(parts[1]).s_BHKV, parts[0].s_BHKV)  # a stretch of no tokens changes nothing
    after_start = absorb(call_of(inputs, (80,)))
    assert torch.equal(before.combine(after_start).s_BHKV, after_start.s_BHKV)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_oracle(kind: str, in_place: bool) -> None:
    """One token at a time, also where steps write over the state before, gives the oracle's outputs and state."""
    inputs = AffineInputs.random(kind, 9, channels=True)
    want, want_state = inputs.naive()
    x, state = inputs.sequence, AffineState(inputs.replicated["state"].clone())
    outputs = []
    with torch.no_grad():
        for t in range(9):
            q, k, v, decay = (x[name][:, :, t] for name in ("q", "k", "v", "log_decay"))
            if kind == "delta rule":
                step, rest = gated_delta_step, {"beta_BH": x["beta"][:, :, t]}
            else:
                erase = (x["a"][:, :, t], x["b"][:, :, t]) if "a" in x else None
                bonus = inputs.replicated.get("bonus")
                step, rest = affine_step, {"erase": erase, "bonus_HK": bonus, "read": call_of(inputs).read}
            if in_place:
                with steps_in_place():
                    out, state = step(q, k, v, state, log_decay_BHK=decay, **rest)
            else:
                out, state = step(q, k, v, state, log_decay_BHK=decay, **rest)
            outputs.append(out)
    assert_close(torch.stack(outputs, dim=2), want)
    assert_close(state.s_BHKV, want_state.s_BHKV, kind="state")


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_the_oracles(kind: str) -> None:
    """The gradient of the squared gradient equals the oracle's."""
    inputs = AffineInputs.random(kind, 70, channels=True, sizes=(1, 2, 4, 3))
    results = []
    for run in (AffineInputs.naive, lambda x: x.run(STREAMING)):
        leaves = inputs.leaves()
        out, after = run(leaves)
        tensors = list(leaves.tensors.values())
        first = torch.autograd.grad(weighted_sum(out, after.s_BHKV), tensors, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        results.append(torch.autograd.grad(penalty, tensors, allow_unused=True, materialize_grads=True))
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("kind", KINDS)
def test_chunk_by_chunk_bits_do_not_depend_on_cuts(kind: str) -> None:
    """Cut between chunks and passed on, outputs and state have the bits of one call."""
    inputs = AffineInputs.random(kind, 64 * 5 + 9, channels=True, dtype=torch.float32)
    call = call_of(inputs)
    want, want_state = recur_by_chunks(call)
    outputs, state = [], None
    for start, stop in ((0, 64), (64, 256), (256, 329)):
        out, state = recur_by_chunks(replace(call.part(start, stop), state=state))
        outputs.append(out)
    assert torch.equal(torch.cat(outputs, dim=2), want)
    assert state is not None and torch.equal(state.s_BHKV, want_state.s_BHKV)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    """Outputs, the last state and gradients are those of the independent vectors."""
    x = golden(f"affine_{name}")
    fields = [key for key in ("q", "k", "v", "log_decay", "beta", "a", "b", "u", "S0") if key in x]
    leaves = {key: x[key].clone().requires_grad_() for key in fields}
    state = AffineState.from_sums(leaves["S0"])
    qkv, decay = (leaves["q"], leaves["k"], leaves["v"]), leaves["log_decay"]
    if "beta" in x:
        out, after = gated_delta_rule(*qkv, beta_BHL=leaves["beta"], log_decay_BHLK=decay, state=state)
    else:
        erase = (leaves["a"], leaves["b"]) if "a" in x else None
        read = "before" if "u" in x else "after"
        out, after = affine_recurrence(
            *qkv, log_decay_BHLK=decay, erase=erase, bonus_HK=leaves.get("u"), read=read, state=state
        )
    assert_close(out, x["out"], kind="golden")
    assert_close(after.s_BHKV, x["S"][:, :, -1], kind="golden")
    ((x["G"] * out).sum() + (x["Gs"] * after.s_BHKV).sum()).backward()
    for key, leaf in leaves.items():
        want = x["grad_g" if key == "log_decay" else f"grad_{key}"]
        assert leaf.grad is not None
        assert_close(leaf.grad, want, kind="golden", what=key)


def test_meta_tensors_have_the_shapes_of_results() -> None:
    """Forward and backward run where tensors have no values."""
    inputs = AffineInputs.random("delta rule", 130, channels=False, closed=False)
    on_meta = AffineInputs(
        inputs.kind,
        {name: t.to("meta").requires_grad_() for name, t in inputs.sequence.items()},
        {name: t.to("meta") for name, t in inputs.replicated.items()},
    )
    out, after = on_meta.run(STREAMING)
    out.sum().backward()
    assert out.shape == inputs.sequence["v"].shape and after.s_BHKV.shape == inputs.replicated["state"].shape


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"log_decay_BHLG": torch.zeros(2, 3, 4, 2)}, ShapeError, "needed are 1 or 8"),
        ({"v_BHLV": torch.zeros(2, 3, 5, 5)}, ShapeError, "the same batch, heads and tokens"),
        ({"beta_BHL": torch.zeros(2, 3, 5)}, ShapeError, "beta has shape"),
        ({"bonus_HK": torch.zeros(3, 8)}, InputError, "read='after'"),
        ({"read": "behind"}, InputError, "'after' or 'before'"),
        ({"state": AffineState(torch.zeros(2, 3, 8, 4))}, ShapeError, "these inputs need"),
        ({"documents": (9,)}, ShapeError, "document starts at 9"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], error: type[Exception], words: str) -> None:
    """Shapes and settings that mean nothing are refused with what is needed."""
    call = call_of(AffineInputs.random("decay", 4, channels=True))
    with pytest.raises(error, match=words):
        absorb(replace(call, **change))  # type: ignore[arg-type]


def test_states_that_do_not_fit_are_refused() -> None:
    """A state to go on from has no transition, and stretches of different kinds do not join."""
    decays, erases = (absorb(call_of(AffineInputs.random(kind, 4, channels=True))) for kind in ("decay", "erasing"))
    state = AffineState.from_sums(decays.s_BHKV)
    with pytest.raises(ShapeError, match="has no transition"):
        decays.combine(state)
    one_decay = absorb(call_of(AffineInputs.random("decay", 4, channels=False)))
    for later in (erases, one_decay):
        with pytest.raises(ShapeError, match="do not fit together"):
            decays.combine(later)
    with pytest.raises(ShapeError, match="float32 or float64"):
        AffineState.from_sums(decays.s_BHKV.bfloat16())


def test_a_step_refuses_what_the_recurrence_does() -> None:
    """A bonus that would count for nothing, and another `read`."""
    x, state = torch.zeros(1, 2, 3), AffineState(torch.zeros(1, 2, 3, 3))
    with pytest.raises(InputError, match="read='before'"):
        affine_step(x, x, x, state, log_decay_BHK=x, bonus_HK=x[0])
    with pytest.raises(InputError, match="'after' or 'before'"):
        affine_step(x, x, x, state, log_decay_BHK=x, read="behind")  # type: ignore[arg-type]

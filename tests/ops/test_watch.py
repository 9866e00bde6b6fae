"""Counting guarded denominators: exact in every form of attention, by layer and head, and without any effect."""

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, LinearState, LocalSequenceOps, Watch, linear_attention_step, watching
from dist_attn.ops.linear_attention import linear_attention_naive
from dist_attn.sharded import ShardedSequenceOps
from tests.support.attention import BATCH, HEADS, RANDOM, VALUES, Inputs
from tests.support.models import small_config, small_model

POLICY = Denominator("floor", 0.3)
LENGTH = 150


def _inputs() -> Inputs:
    """Inputs whose sigma is large enough that many denominators are not positive."""
    inputs = Inputs.random(LENGTH, LENGTH, gate=True, scale=True, state=False)
    inputs.replicated["w"] *= 2
    return inputs


def _counted_by_hand() -> tuple[tuple[int, ...], ...]:
    """Per head, how many of the denominators that the oracle's recurrence forms lie below the floor."""
    (q, k, v), kwargs = _inputs().arguments()
    phi = kwargs["feature_map"]
    state = LinearState.identity(BATCH, HEADS, 2 * RANDOM, VALUES, dtype=torch.float64)
    below_H = torch.zeros(HEADS, dtype=torch.int64)
    for t in range(LENGTH):
        gates = {"log_gate_BH": kwargs["log_gate_BHS"][:, :, t], "key_scale_BH": kwargs["key_scale_BHS"][:, :, t]}
        state = state.advance(phi(k[:, :, t : t + 1])[:, :, 0], v[:, :, t], **gates)
        den_BH1 = state.read(phi(q[:, :, t : t + 1]))[1]
        below_H += (den_BH1[..., 0] < POLICY.eps * state.mass_BH).sum(0)
    return (tuple(below_H.tolist()),)


def test_every_form_counts_the_same() -> None:
    """Oracle, streaming form, steps and ranks count, per head, what the recurrence written out by hand finds."""
    want = _counted_by_hand()
    assert 0 < sum(want[0]) < BATCH * HEADS * LENGTH
    (q, k, v), kwargs = _inputs().arguments()
    for attention in (linear_attention_naive, LocalSequenceOps().linear_attention):
        watch = Watch()
        with watching(watch):
            attention(q, k, v, **kwargs, denominator=POLICY)
        assert watch.guarded == want
        assert watch.denominators == BATCH * HEADS * LENGTH
    steps, state = Watch(), LinearState.identity(BATCH, HEADS, 2 * RANDOM, VALUES, dtype=torch.float64)
    with watching(steps):
        for t in range(LENGTH):
            gates = {"log_gate_BH": kwargs["log_gate_BHS"][:, :, t], "key_scale_BH": kwargs["key_scale_BHS"][:, :, t]}
            args = (q[:, :, t], k[:, :, t], v[:, :, t], state)
            _, state = linear_attention_step(*args, feature_map=kwargs["feature_map"], **gates, denominator=POLICY)
    assert steps.guarded == want


def test_ranks_count_their_own() -> None:
    """The counts of all ranks, empty ones too, add up to those of one rank."""
    layout = SequenceLayout.from_lengths([70, 0, 80])

    def body(comm: Communicator) -> tuple[int, ...]:
        own, watch = _inputs().leaves(*layout.range(comm.rank)), Watch()
        args, kwargs = own.arguments()
        with watching(watch):
            out, _ = ShardedSequenceOps(comm, layout).linear_attention(*args, **kwargs, denominator=POLICY)
            out.sum().backward()  # forms the denominators again, which does not count
        return watch.guarded[0] if watch.guarded else (0,) * HEADS

    counts = run_simulated(body, 3)
    assert (tuple(map(sum, zip(*counts, strict=True))),) == _counted_by_hand()


@pytest.mark.parametrize("policy", ["floor", "exact", "clamp", "sign_clamp", "abs_clamp"])
def test_watching_changes_nothing(policy: str) -> None:
    """Outputs and gradients are bitwise those without a watch, and `exact` guards nothing."""
    results = []
    for watch in (None, Watch()):
        leaves = _inputs().leaves()
        args, kwargs = leaves.arguments()
        with watching(watch):
            out, _ = LocalSequenceOps().linear_attention(*args, **kwargs, denominator=Denominator(policy, 0.3))
            out.sum().backward()
        results.append([out, *leaves.gradients().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (sum(watch.guarded[0]) == 0) == (policy == "exact")


def test_a_model_says_which_layer() -> None:
    """Counts of a model come by layer and head, from whole texts and from steps, and only of the rows that count."""
    model, tokens = small_model(small_config()), torch.arange(40)[None].expand(3, 40) % 7
    watch = Watch()
    with torch.no_grad(), watching(watch):
        model.hidden(tokens)
    assert [len(layer) for layer in watch.guarded] == [2, 2]
    assert watch.denominators == 2 * 2 * 3 * 40
    whole = watch.guarded
    watch.clear()
    watch.rows = 1
    with torch.no_grad(), watching(watch):
        state = model.initial_state(3)
        for t in range(40):
            _, state = model.step(tokens[:, t], state)
    assert [[3 * n for n in layer] for layer in watch.guarded] == [list(layer) for layer in whole]
    assert watch.denominators == 2 * 2 * 40

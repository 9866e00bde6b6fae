"""The monoid of linear attention: identity, associativity, document starts, batches."""

from dataclasses import replace

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn.ops import LinearState
from tests.support.closeness import assert_close


def _state(seed: int, reset: bool = False) -> LinearState:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    return LinearState(
        normal(2, 3, 4, 5), normal(2, 3, 4), normal(2, 3).abs(), -normal(2, 3).abs(), torch.full((2, 3), reset)
    )


@pytest.mark.parametrize(
    "resets", [(False, False, False), (False, True, False), (True, False, True), (False, False, True)]
)
def test_combine_is_associative(resets):
    """(a b) c = a (b c), wherever a document starts."""
    a, b, c = (_state(i, reset) for i, reset in enumerate(resets))
    left, right = a.combine(b).combine(c), a.combine(b.combine(c))
    for x, y in zip(left.tensors(), right.tensors(), strict=True):
        assert_close(x, y, kind="state")


def test_identity_changes_nothing():
    """Combining with the identity on either side gives the same bits back."""
    unit, a = LinearState.identity(2, 3, 4, 5, dtype=torch.float64), _state(0)
    for got in (unit.combine(a), a.combine(unit)):
        assert all(torch.equal(x, y) for x, y in zip(got.tensors(), a.tensors(), strict=True))


def test_a_document_start_drops_what_came_before():
    """After a reset nothing of the earlier state is left, not even as NaN."""
    early, late = _state(0), _state(1, reset=True)
    got = early.combine(late)
    assert torch.equal(got.s_BHMV, late.s_BHMV)
    assert bool(got.reset_BH.all())


def test_states_of_a_batch_can_be_taken_apart_and_put_together():
    """Selecting batch elements and stacking them again gives the same state."""
    a = _state(0)
    again = LinearState.stack([a.select(slice(0, 1)), a.select(slice(1, 2))])
    assert all(torch.equal(x, y) for x, y in zip(again.tensors(), a.tensors(), strict=True))


def test_advance_is_combination_with_one_token():
    """One `advance` equals combining with the state of that one token."""
    a = _state(0)
    k, v = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(2, 3, 5, dtype=torch.float64)
    gate, scale = -torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    token = LinearState.identity(2, 3, 4, 5, dtype=torch.float64).advance(k, v, log_gate_BH=gate, key_scale_BH=scale)
    got = a.advance(k, v, log_gate_BH=gate, key_scale_BH=scale)
    for x, y in zip(got.tensors(), a.combine(token).tensors(), strict=True):
        assert_close(x, y, kind="state")


@pytest.mark.parametrize("field", ["s_BHMV", "z_BHM", "mass_BH"])
def test_a_state_of_other_sizes_is_refused(field: str) -> None:
    """Each of the three sums has to be of the sizes of the inputs."""
    state = _state(0)
    state.check(2, 3, 4, 5)
    with pytest.raises(ShapeError, match="these inputs need"):
        replace(state, **{field: getattr(state, field)[:1]}).check(2, 3, 4, 5)

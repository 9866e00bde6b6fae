"""The study of the gated delta rule: what it counts, and that its peer computes the same."""

from importlib.util import find_spec

import pytest

from benchmarks.cases import delta_inputs
from benchmarks.delta import WEIGHTS, carry_over_formula, delta_flops
from benchmarks.peers import delta_rule
from dist_attn.ops import gated_delta_rule
from tests.support.closeness import assert_close


def test_operations_are_counted_by_token_and_head() -> None:
    """Of the form in chunks of 64 with keys and values of 128 they are 180,224 for each."""
    assert delta_flops(2_048) == 2_048 * 8 * 180_224


@pytest.mark.parametrize("kind", WEIGHTS)
def test_carries_are_the_formula(kind: str) -> None:
    """Whatever the length, a rank sends one state and its transition."""
    assert [carry_over_formula(kind, length) for length in (3, 70)] == [1.0, 1.0]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_peer_computes_the_same() -> None:
    """transformers' plain form has the outputs of ours."""
    q, k, v, decay, beta = delta_inputs(70, 2, 8)
    out, _ = gated_delta_rule(q, k, v, beta_BHL=beta, log_decay_BHLK=decay)
    assert_close(delta_rule(q, k, v, decay, beta), out)

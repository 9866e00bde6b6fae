"""What is measured for Scaleformer's figures computes the same thing."""

import pytest
import torch

from benchmarks.cases import OURS
from dist_attn_papers.ops.relative_attention.numerators import numerators
from dist_attn_papers.tables import scaleformer_works
from tests.support.closeness import assert_close
from tests.support.sharded_call import random_tensor


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [5, 16, 40, 150])
def test_the_forms_agree(length, causal):
    """The quadratic forms give the same sums as ours, at lengths below and above k too."""
    q, k, v = (random_tensor(2, 1, length, scaleformer_works.SIZE, seed=s) for s in range(3))
    rp = random_tensor(1, 2 * scaleformer_works.REACH + 1, scaleformer_works.SIZE, seed=3)
    want = scaleformer_works.naive_positions(q, v, rp, causal)
    assert_close(scaleformer_works.ours_positions(q, v, rp, causal), want)
    if causal:
        want = scaleformer_works.naive_kernel(q, k, v, causal)
        # Ours without its division: no position scores, the values themselves.
        nothing = torch.zeros(1, 1, scaleformer_works.SIZE, dtype=torch.float64)
        assert_close(numerators(q, k, v, nothing, own=True), want)


def test_forms_that_need_too_much_are_left_out():
    """Where they would hold more than 4 GB the quadratic forms are missing."""
    assert scaleformer_works.position_works(1 << 16, causal=False).keys() == {OURS}
    assert scaleformer_works.kernel_works(1 << 14, causal=True).keys() == {OURS}
    assert scaleformer_works.kernel_works(1 << 13, causal=True).keys() == {OURS, "naive"}

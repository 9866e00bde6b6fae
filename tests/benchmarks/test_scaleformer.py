"""What is measured for Scaleformer's figures computes the same thing, and can be drawn; peaks of memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import scaleformer
from benchmarks.cases import CASES, OURS, Works
from benchmarks.memory import peak_bytes
from benchmarks.report import measure
from benchmarks.timing import interleaved
from dist_attn.ops.relative_attention.numerators import numerators
from tests.support.closeness import assert_close
from tests.support.sharded_call import random_tensor


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [5, 16, 40, 150])
def test_the_forms_agree(length, causal):
    """The quadratic forms give the same sums as ours, at lengths below and above k too."""
    q, k, v = (random_tensor(2, 1, length, scaleformer.SIZE, seed=s) for s in range(3))
    rp = random_tensor(1, 2 * scaleformer.REACH + 1, scaleformer.SIZE, seed=3)
    want = scaleformer.naive_positions(q, v, rp, causal)
    assert_close(scaleformer.ours_positions(q, v, rp, causal), want)
    if causal:
        want = scaleformer.naive_kernel(q, k, v, causal)
        # Ours without its division: no position scores, the values themselves.
        nothing = torch.zeros(1, 1, scaleformer.SIZE, dtype=torch.float64)
        assert_close(numerators(q, k, v, nothing, own=True), want)


def test_forms_that_need_too_much_are_left_out():
    """Where they would hold more than 4 GB the quadratic forms are missing."""
    assert scaleformer.position_works(1 << 16, causal=False).keys() == {OURS}
    assert scaleformer.kernel_works(1 << 14, causal=True).keys() == {OURS}
    assert scaleformer.kernel_works(1 << 13, causal=True).keys() == {OURS, "naive"}


def test_the_peak_of_memory():
    """What is held at the same time counts, what was freed before does not."""
    size = 1 << 20

    def work() -> torch.Tensor:
        first = torch.ones(size)
        second = first + 1
        del first
        return second + 1

    assert 0 <= peak_bytes(work) - 2 * 4 * size < 1024


def test_a_spent_budget_ends_the_rounds():
    """When the time of a size is up there are three rounds, not all that were asked for."""
    taken = interleaved({"a": lambda: None}, 50, budget_s=0.0)
    assert len(taken["a"].seconds) == 3


def test_missing_peers_are_dashes_and_results_are_drawn(tmp_path: Path):
    """A table has a dash where a form was too large, and the figure has what is there."""
    whole = CASES["scaleformer-4-masked"]

    def works(size: int) -> Works:
        return {name: work for name, work in whole.works(size).items() if size == 16 or name != "naive"}

    cut = measure(replace(whole, works=works), (16, 32), 2)
    table = cut.as_markdown()
    assert "The fastest of 2 rounds" in table
    assert "| – |" in table
    cut.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000

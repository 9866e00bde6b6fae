"""A polynomial memory of prototypes: it is that of the quantised input, and the experiment says what that loses."""

from pathlib import Path

import pytest
import torch

from dist_attn.ops import LegsState
from dist_attn.ops.legs import absorb_signal
from dist_attn_research.papers.experiment import Budget, Done
from dist_attn_research.papers.finding import Report
from dist_attn_research.papers.product_quantisation import learn_prototypes, nearest
from dist_attn_research.papers.quantised_memory import CUTS, QUANTISED_MEMORY, coefficients_of, indicators
from dist_attn_research.papers.runner import carry_out


@pytest.mark.parametrize(("parts", "count"), [(1, 1), (2, 3), (6, 2)])
def test_it_is_the_memory_of_the_nearest_prototypes(parts: int, count: int) -> None:
    """Coefficients that are looked up are those of the input with each part replaced by its nearest prototype."""
    torch.manual_seed(count)
    x_LD = torch.randn(40, 6, dtype=torch.float64)
    prototypes_SCK = learn_prototypes(x_LD, parts, count, 0).double()
    chosen_LS = nearest(x_LD, prototypes_SCK)
    replaced_LD = torch.cat([prototypes_SCK[part][chosen_LS[:, part]] for part in range(parts)], dim=1)
    wanted, ours = (
        absorb_signal(f_LD[None], LegsState.empty(1, f_LD.shape[1], 5)).c_BDN[0]
        for f_LD in (replaced_LD, indicators(x_LD, prototypes_SCK))
    )
    torch.testing.assert_close(coefficients_of(ours, prototypes_SCK), wanted)


def test_one_prototype_is_the_nearest_at_a_time() -> None:
    """Each subspace has exactly one 1 for every token."""
    x_LD = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    ones_LR = indicators(x_LD, torch.randn(4, 3, 2))
    assert ones_LR.shape == (9, 12) and bool((ones_LR.view(9, 4, 3).sum(2) == 1).all())


def test_the_report_has_every_cut() -> None:
    """Each cut has a row with its error, its time and how much faster it is; the panels can be drawn."""
    scores = {"columns": 192.0, "seconds:exact": 0.4}
    for parts, count in CUTS:
        scores |= {f"{what}:{parts}-by-{count}": 0.2 for what in ("error", "signal", "seconds")}
    report = QUANTISED_MEMORY.report([Done("order-16", 0, scores, 9.0, {"order": 16, "tokens": 8192}, "")])
    assert isinstance(report, Report)
    (table,) = report.tables
    assert len(table.rows) == len(CUTS) and table.rows[0] == ("1", "4", "48.0", "0.200", "0.200", "200.0", "2.00")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for _, draw in report.panels:
        draw(figure.add_subplot())


def test_it_runs_on_the_books(tmp_path: Path) -> None:
    """The smallest amount of it has an error for every cut, least where there are most prototypes."""
    if not Path("data/books/emma.txt").exists():
        pytest.skip("data/books is not there")
    (done,), left = carry_out(tmp_path, QUANTISED_MEMORY.jobs(Budget(smoke=True), (0,))[:1], lambda: False)
    errors = {cut: done.scores["error:{}-by-{}".format(*cut)] for cut in CUTS}
    assert not left and min(errors, key=errors.__getitem__) == (64, 64) and all(0 <= e < 1.5 for e in errors.values())

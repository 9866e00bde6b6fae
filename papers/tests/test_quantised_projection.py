"""Product quantisation of a linear map and of a memory: lookups against the definition, prototypes, experiments."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dist_attn.errors import ConfigError, ShapeError
from dist_attn.models import LanguageModel, LanguageModelConfig
from dist_attn_papers.ops.legs import LegsState, absorb_signal
from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.finding import Report
from dist_attn_papers.tables.product_quantisation import (
    QuantisedLinear,
    learn_prototypes,
    nearest,
    quantised_linear_naive,
)
from dist_attn_papers.tables.quantised_memory import CUTS, QUANTISED_MEMORY, coefficients_of, indicators
from dist_attn_papers.tables.quantised_projection import PARTS, PROTOTYPES, QUANTISED_PROJECTION, SIZES, quantise
from dist_attn_papers.tables.runner import carry_out


@pytest.mark.parametrize(("parts", "prototypes", "bias"), [(1, 1, True), (3, 5, False), (6, 4, True), (12, 7, True)])
def test_lookups_are_the_map_of_the_nearest_prototypes(parts: int, prototypes: int, bias: bool) -> None:
    """For any cut, with and without a bias, outputs and chosen prototypes are those of the definition."""
    torch.manual_seed(parts)
    linear, x = nn.Linear(12, 7, bias=bias).double(), torch.randn(2, 9, 12, dtype=torch.float64)
    centres = torch.randn(parts, prototypes, 12 // parts, dtype=torch.float64)
    wanted, codes = quantised_linear_naive(x.flatten(0, 1), centres, linear.weight, linear.bias)
    torch.testing.assert_close(QuantisedLinear(linear, centres)(x), wanted.view(2, 9, 7))
    assert torch.equal(nearest(x.flatten(0, 1), centres), codes)


def test_vectors_made_of_prototypes_are_exact() -> None:
    """Vectors whose parts take a few values are learnt without an error; the same seed learns the same."""
    torch.manual_seed(0)
    few = 3.0 * torch.randn(4, 6, 2)
    drawn = torch.randint(6, (400, 4))
    x = torch.cat([few[part][drawn[:, part]] for part in range(4)], dim=1)
    linear, centres = nn.Linear(8, 5), learn_prototypes(x, 4, 12, 0)
    torch.testing.assert_close(QuantisedLinear(linear, centres)(x), linear(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(learn_prototypes(x, 4, 12, 0), centres)


def test_more_prototypes_are_nearer() -> None:
    """The error of Gaussian vectors falls with the prototypes and with the parts."""
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    linear = nn.Linear(8, 8)

    def error(parts: int, prototypes: int) -> float:
        return float((QuantisedLinear(linear, learn_prototypes(x, parts, prototypes, 0))(x) - linear(x)).norm().item())

    assert error(2, 64) < error(2, 8) < error(2, 2)
    assert error(8, 8) < error(4, 8) < error(1, 8)


def test_what_cannot_be_quantised() -> None:
    """Parts that do not divide, too few vectors and vectors of another size are said to be so."""
    x = torch.randn(5, 6)
    with pytest.raises(ConfigError, match="4 parts do not divide vectors of 6"):
        learn_prototypes(x, 4, 2, 0)
    with pytest.raises(ConfigError, match="9 prototypes were asked for from 5"):
        learn_prototypes(x, 2, 9, 0)
    with pytest.raises(ShapeError, match=r"need \[L, 8\]"):
        nearest(x, torch.randn(2, 3, 4))


def test_a_model_is_quantised_by_what_it_reads_first() -> None:
    """Every projection behind a state space is replaced; with a prototype for every token the model does not change."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_layers": 2, "mlp_size": 8}
    mixer = {"kind": "s4d", "hidden_size": 8, "state_size": 4}
    model = LanguageModel(LanguageModelConfig.model_validate({**sizes, "mixer": mixer})).eval()
    tokens = torch.randint(9, (24,))
    before, _ = model(tokens[None])
    quantise(model, tokens, 2, 24, 0)
    assert sum(isinstance(module, QuantisedLinear) for module in model.modules()) == 2
    after, _ = model(tokens[None])
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.5)
    assert not torch.equal(after, before)


def test_the_report() -> None:
    """Errors stand by parts and prototypes, speeds over the plain product; keys are unique and settings are JSON."""
    jobs = QUANTISED_PROJECTION.jobs(Budget(), (0,))
    assert len({job.key for job in jobs}) == len(jobs) == 2 + len(PARTS) * len(PROTOTYPES)
    assert all('"/' not in json.dumps(job.settings) for job in jobs)
    times = {f"{s}-by-{c}:{size}": 2e-3 for s in PARTS for c in PROTOTYPES for size in SIZES}
    scores = {job.arm: {"error": 0.25, "bits_per_byte": 2.5, "exact_bits_per_byte": 2.25} for job in jobs[2:]}
    scores["speed"] = times | {f"matmul:{size}": 4e-3 for size in SIZES}
    done = [Done(job.arm, 0, scores[job.arm], 1.0, dict(job.settings), "") for job in jobs if job.arm in scores]
    errors, speeds = QUANTISED_PROJECTION.report(done).tables
    assert errors.rows[0] == ("4", "4", "0.250", "2.500", "+0.250")
    assert {row[5] for row in speeds.rows} == {"2.00"} and speeds.rows[0][6] == "32.0"


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

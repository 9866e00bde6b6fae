"""Experiments that take times: the fit of a curve, crossovers, the layer that is timed, and reports of what is done."""

import json

import numpy as np
import pytest

from dist_attn.comm.local import LocalCommunicator
from dist_attn_papers.tables.distributed_softmax import (
    DISTRIBUTED_SOFTMAX,
    LONGEST,
    UP_TO,
    fit_linear_and_square,
    seconds_of,
)
from dist_attn_papers.tables.experiment import Budget, Done, Experiment
from dist_attn_papers.tables.scaleformer_figures import FIGURES, SCALEFORMER_FIGURES, crossover


@pytest.mark.parametrize(("a", "b"), [(3e-5, 2e-9), (3e-5, 0.0), (0.0, 2e-9)])
def test_the_fit_finds_both_terms(a: float, b: float) -> None:
    """Times made of a L + b L^2 give a and b back, and a term that is not there is 0."""
    seconds = {length: a * length + b * length**2 for length in (256, 1024, 4096, 16_384)}
    np.testing.assert_allclose(fit_linear_and_square(seconds), (a, b), rtol=1e-9, atol=1e-16)


def test_no_term_of_a_fit_is_negative() -> None:
    """Times that grow less than the length are a straight line, not one minus a square."""
    a, b = fit_linear_and_square({256: 1.0, 1024: 3.0, 4096: 9.0})
    assert a > 0 and b == 0.0


def test_a_crossover_lasts() -> None:
    """The first length from which on the other is faster at every longer one; a single win before does not count."""
    slow = {16: 1.0, 32: 3.0, 64: 4.0, 128: 16.0}
    assert crossover(slow, {16: 2.0, 32: 2.0, 64: 5.0, 128: 8.0, 256: 16.0}) == 128
    assert crossover(slow, {16: 2.0, 32: 2.0, 64: 3.0, 128: 4.0}) == 32
    assert crossover(slow, dict.fromkeys(slow, 99.0)) is None


@pytest.mark.parametrize("form", UP_TO)
def test_every_form_can_be_timed(form: str) -> None:
    """A layer with each form of attention takes some time on one rank."""
    with LocalCommunicator() as comm:
        assert 0 < seconds_of(form, comm, 33, 1) < 60


def _done(experiment: Experiment, scores: dict[str, dict[str, float]]) -> list[Done]:
    jobs = experiment.jobs(Budget(), (0,))
    assert all('"/' not in json.dumps(job.settings) for job in jobs)
    return [Done(job.arm, job.seed, scores[job.arm], 1.0, {}, "") for job in jobs if job.arm in scores]


def test_the_report_of_the_distributed_softmax() -> None:
    """Lengths stand over the plain form's, slopes come of the last doubling, and missing forms are said to be so."""
    square = {f"seconds_at_{length}": 1e-6 * length**2 for length in (256, 512, 1024)}
    scores = {"all-heads": square, LONGEST: dict.fromkeys(UP_TO, 3000.0) | {"reshuffle": 120_000.0}}
    times, fits = DISTRIBUTED_SOFTMAX.report(_done(DISTRIBUTED_SOFTMAX, scores)).tables
    by_form = {row[0].partition(",")[0]: row for row in fits.rows}
    assert by_form["all heads at once"][3] == "2.00" and by_form["head reshuffle"][5] == "40.0"
    assert by_form["ring"][1] == "not measured" and times.rows[1][1] == "–"


def test_the_report_of_scaleformers_figures() -> None:
    """Crossovers and ratios stand beside those read off the paper; figures that are not done yet are said to be so."""
    lengths = (512, 1024, 2048)
    scores = {f"naive_seconds_at_{n}": 1e-8 * n**2 for n in lengths} | {
        f"ours_seconds_at_{n}": 1e-5 * n for n in lengths
    }
    name = next(iter(FIGURES))
    claims, milliseconds = SCALEFORMER_FIGURES.report(_done(SCALEFORMER_FIGURES, {name: scores})).tables
    assert claims.rows[0][3] == "1,024"
    assert claims.rows[0][6] == "1.02" and claims.rows[0][7] == "2.00" and claims.rows[1][2] == "not measured"
    assert milliseconds.title == f"{name}, milliseconds"
    held = {f"ours_bytes_at_{n}": n * 2.0**20 for n in lengths}
    *_, mebibytes = SCALEFORMER_FIGURES.report(_done(SCALEFORMER_FIGURES, {name: scores | held})).tables
    assert mebibytes.rows[0] == ("512", "–", "–", "512.00")

"""Sec. 7.4 of Unified View, the projection itself: a polynomial memory of prototypes in place of one of every column.

The paper cuts the input's D columns into S subspaces, learns C prototypes in each on the first pass, and projects onto
polynomials what it has S C of and not D. Here the memory is LegS, whose step is the same for all columns: so it absorbs
for each prototype the sequence of when it was the nearest, and the coefficients of all columns are looked up in those.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measured import Axes, Table
from benchmarks.timing import interleaved
from dist_attn.checkpoints import load_model
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser
from dist_attn_papers.ops.legs import LegsState, absorb_signal, reconstruct
from dist_attn_papers.tables.books import FOLDER
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report
from dist_attn_papers.tables.novels import TEST
from dist_attn_papers.tables.product_quantisation import learn_prototypes, nearest

__all__ = ["QUANTISED_MEMORY", "coefficients_of", "indicators"]

MODEL, FIRST_PASS = "books-6m", "emma.txt"
CUTS = tuple(product((1, 4, 16, 64), (4, 16, 64)))  # S subspaces, C prototypes of each
ORDERS, TOKENS, POINTS, ROUNDS = (16, 64), 8192, 64, 3
SMOKE_TOKENS = 128


def indicators(x_LD: Tensor, prototypes_SCK: Tensor) -> Tensor:
    """When each prototype is the nearest of its subspace: [L, D] -> [L, S C], ones and zeros in the dtype of x."""
    parts, count, _ = prototypes_SCK.shape
    return F.one_hot(nearest(x_LD, prototypes_SCK), count).reshape(-1, parts * count).to(x_LD.dtype)


def coefficients_of(c_RN: Tensor, prototypes_SCK: Tensor) -> Tensor:
    """The columns' coefficients from those of their prototypes, by linearity: [S C, N] -> [D, N]."""
    parts, count, size = prototypes_SCK.shape
    c_SCN = c_RN.view(parts, count, -1)
    return torch.einsum("sck,scn->skn", prototypes_SCK.to(c_RN.dtype), c_SCN).reshape(parts * size, -1)


def _remember(f_LD: Tensor, order: int) -> Tensor:
    """The LegS coefficients after all tokens, [D, N]."""
    return absorb_signal(f_LD[None], LegsState.empty(1, f_LD.shape[1], order)).c_BDN[0]


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    tokens = SMOKE_TOKENS if budget.smoke else TOKENS
    return [_job(order, tokens, 1 if budget.smoke else ROUNDS, seed) for seed in seeds for order in ORDERS]


def _job(order: int, tokens: int, rounds: int, seed: int) -> Job:
    settings = {"order": order, "tokens": tokens, "rounds": rounds, "cuts": CUTS, "model": MODEL, "seed": seed}

    def work(folder: Path, watch: Watch) -> Scores:
        torch.set_num_threads(1)
        first_LD, x_LD = (_vectors(name, tokens) for name in (FIRST_PASS, TEST))
        points_P = torch.linspace(0.0, 1.0, POINTS, dtype=torch.float64)
        exact_DN = _remember(x_LD, order)
        remembered = reconstruct(exact_DN, points_P)
        works: dict[str, Callable[[], object]] = {"exact": partial(_remember, x_LD, order)}
        scores: dict[str, float] = {"columns": float(x_LD.shape[1])}
        cuts = [(parts, count) for parts, count in CUTS if count <= tokens]
        for parts, count in cuts:
            prototypes_SCK = learn_prototypes(first_LD, parts, count, seed)
            name = f"{parts}-by-{count}"
            looked_up_DN = _by_prototypes(x_LD, prototypes_SCK, order)
            again = reconstruct(looked_up_DN, points_P)
            scores[f"error:{name}"] = float((looked_up_DN - exact_DN).norm() / exact_DN.norm())
            scores[f"signal:{name}"] = float((again - remembered).norm() / remembered.norm())
            works[name] = partial(_by_prototypes, x_LD, prototypes_SCK, order)
            watch.tell(f"{name}: coefficients {scores[f'error:{name}']:.3f} off")
        with torch.inference_mode():
            times = interleaved(works, rounds)
        return scores | {f"seconds:{name}": time.fastest for name, time in times.items()}

    return Job(f"order-{order}", seed, settings, work)


def _by_prototypes(x_LD: Tensor, prototypes_SCK: Tensor, order: int) -> Tensor:
    return coefficients_of(_remember(indicators(x_LD, prototypes_SCK), order), prototypes_SCK)


def _vectors(book: str, tokens: int) -> Tensor:
    """The embeddings of a book's first tokens in the model that ships, [L, D]."""
    folder = resolve_model_folder(MODEL)
    model, tokeniser = load_model(folder), load_tokeniser(folder)
    numbers = tokeniser.encode((Path(FOLDER) / book).read_bytes()[: 8 * tokens])[:tokens]
    with torch.inference_mode():
        found: Tensor = model.embedding(torch.from_numpy(numbers).long())
    return found.clone()


def _report(done: Sequence[Done]) -> Report:
    panels = (
        ("relative error of the coefficients", partial(_draw, done, "error")),
        ("times as fast as the exact memory", partial(_draw, done, "speed")),
    )
    return Report(tuple(_table(one) for one in done), NOTES, panels)


def _cuts(one: Done) -> list[tuple[int, int]]:
    return [(parts, count) for parts, count in CUTS if f"error:{parts}-by-{count}" in one.scores]


def _table(one: Done) -> Table:
    rows, columns = [], one.scores["columns"]
    for parts, count in _cuts(one):
        name = f"{parts}-by-{count}"
        exact, taken = one.scores["seconds:exact"], one.scores[f"seconds:{name}"]
        cells = (f"{one.scores[f'{what}:{name}']:.3f}" for what in ("error", "signal"))
        times = (f"{1e3 * taken:.1f}", f"{exact / taken:.2f}")
        rows.append((str(parts), str(count), f"{columns / (parts * count):.1f}", *cells, *times))
    heads = ("subspaces S", "prototypes C", "columns over S C", "error of coefficients", "of the signal remembered")
    title = (
        f"LegS memory of order {one.settings['order']}, {one.settings['tokens']:,} tokens of {columns:.0f} columns; "
        f"exact: {1e3 * one.scores['seconds:exact']:.1f} ms"
    )
    return Table(title, (*heads, "ms, nearest and lookups included", "times as fast"), tuple(rows))


def _draw(done: Sequence[Done], what: str, axes: Axes) -> None:
    for one in done:
        for number, parts in enumerate(sorted({parts for parts, _ in _cuts(one)})):
            points = {}
            for count in (count for s, count in _cuts(one) if s == parts):
                name = f"{parts}-by-{count}"
                speed = one.scores["seconds:exact"] / one.scores[f"seconds:{name}"]
                points[count] = one.scores[f"error:{name}"] if what == "error" else speed
            style = "-" if one.settings["order"] == ORDERS[0] else "--"
            label = f"{parts} subspaces, order {one.settings['order']}"
            axes.plot(list(points), list(points.values()), style, marker="o", color=f"C{number}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="prototypes of each subspace")
    axes.legend(fontsize=6, ncols=2)


NOTES = (
    f"The sequence is the embeddings that {MODEL} has for the tokens of War and Peace; prototypes are learnt from as "
    "many tokens of Emma. Errors are relative, in the Euclidean norm: of coefficients, and of the signals that they "
    f"stand for at {POINTS} points of the past. By linearity nothing but the quantisation of the input is lost.",
    "The memory absorbs S C sequences of ones and zeros in place of D columns; looking up is one small product at the "
    "end. Milliseconds are of one core, the fastest of rounds taken in turns; a hash in place of the nearest "
    "prototype, which the paper would add, is not built.",
)

QUANTISED_MEMORY = Experiment(
    name="uv-quantised-memory",
    question=(
        "A Unified View of Long-Sequence Models, Sec. 7.4: what does a polynomial memory of prototypes remember, "
        "beside one of every column, and what does it save?"
    ),
    tests=("papers/tests/test_quantised_projection.py", "papers/tests/test_legs.py"),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)

"""Sec. 7.4 of Unified View: a state-space layer's projection by prototypes and lookups, its error and its speed."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measured import Axes, Table
from benchmarks.timing import interleaved
from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn.models import CausalModel
from dist_attn.text import Tokeniser
from dist_attn_papers.mixers.state_space import Readout
from dist_attn_papers.studies.perplexity_by_position import token_nats
from dist_attn_papers.tables.books import BLOCK, DEVELOPMENT, FOLDER, WIDTH, BookModel
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report
from dist_attn_papers.tables.product_quantisation import QuantisedLinear, learn_prototypes
from dist_attn_papers.tables.training_job import model_folder

__all__ = ["QUANTISED_PROJECTION", "quantise"]

TRAINED, SPEED = "trained", "speed"
PARTS, PROTOTYPES = (4, 8, 16, 32, 64), (4, 16, 64, 256)
STEPS, FIRST_TOKENS, SCORED_BYTES = 300, 8192, 100_000
SMOKE_TOKENS, SMOKE_BYTES = 300, 1000
FIRST_PASS = "emma.txt"  # of the books that were trained on
SIZES, ROWS, ROUNDS = (128, 512, 1024), 4096, 5


Found = dict[tuple[int, int], Scores]
"""By parts and prototypes."""


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    jobs = [_speed_job(budget)]
    for seed in seeds:
        jobs.append(
            BookModel({"kind": "s4d", "hidden_size": WIDTH}, steps=STEPS, whole=True).job(TRAINED, seed, budget)
        )
        for parts, prototypes in product(PARTS, PROTOTYPES):
            jobs.append(_quality_job(parts, prototypes, seed, budget))
    return jobs


def _quality_job(parts: int, prototypes: int, seed: int, budget: Budget) -> Job:
    settings = {
        "parts": parts,
        "prototypes": prototypes,
        "first_tokens": SMOKE_TOKENS if budget.smoke else FIRST_TOKENS,
        "scored_bytes": SMOKE_BYTES if budget.smoke else SCORED_BYTES,
        "trained_steps": budget.steps(STEPS),
        "seed": seed,
    }
    key = f"{TRAINED}/seed-{seed}"
    return Job(f"{parts}-by-{prototypes}", seed, settings, partial(_quality, settings, key), (key,))


def _quality(settings: dict[str, Any], key: str, folder: Path, watch: Watch) -> Scores:
    torch.set_num_threads(1)
    model, tokeniser = load_model_and_tokeniser(model_folder(folder.parents[1], key))
    first, scored = (
        tokeniser.encode((Path(FOLDER) / name).read_bytes()[:count])
        for name, count in ((FIRST_PASS, 8 * settings["first_tokens"]), (DEVELOPMENT, settings["scored_bytes"]))
    )
    before = _bits_per_byte(model, tokeniser, scored)
    held_out = torch.from_numpy(scored[: settings["first_tokens"]]).long()
    exact = _inputs(model, held_out)
    layers = {name: layer.out for name, layer in _readouts(model).items()}
    quantise(
        model, torch.from_numpy(first[: settings["first_tokens"]]).long(), settings["parts"], settings["prototypes"], 0
    )
    errors = []
    with torch.inference_mode():
        for name, layer in _readouts(model).items():
            wanted = layers[name](exact[name])
            errors.append(float((layer.out(exact[name]) - wanted).norm() / wanted.norm()))
    watch.tell(f"relative errors {', '.join(f'{error:.3f}' for error in errors)}")
    after = _bits_per_byte(model, tokeniser, scored)
    return {"error": sum(errors) / len(errors), "bits_per_byte": after, "exact_bits_per_byte": before}


def quantise(model: nn.Module, tokens_L: Tensor, parts: int, prototypes: int, seed: int) -> None:
    """Read the tokens once by the exact projections, and replace all of them by prototypes of what they were given."""
    given = _inputs(model, tokens_L)
    for name, layer in _readouts(model).items():
        layer.out = QuantisedLinear(layer.out, learn_prototypes(given[name], parts, prototypes, seed))


def _readouts(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Readout)}


@torch.inference_mode()
def _inputs(model: nn.Module, tokens_L: Tensor) -> dict[str, Tensor]:
    """What every projection is given while the model reads the tokens in blocks that stand alone, [L, D] by layer."""
    given: dict[str, list[Tensor]] = {name: [] for name in _readouts(model)}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        return lambda _, inputs: given[name].append(inputs[0].flatten(0, -2).clone())

    hooks = [layer.out.register_forward_pre_hook(keep(name)) for name, layer in _readouts(model).items()]
    for block_L in tokens_L.split(BLOCK):
        model(block_L[None])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in given.items()}


def _bits_per_byte(model: CausalModel, tokeniser: Tokeniser, tokens: Any) -> float:
    nats = token_nats(model, tokens, BLOCK)
    return float(nats.sum() / torch.log(torch.tensor(2.0))) / int(tokeniser.byte_lengths(tokens[1:]).sum())


def _speed_job(budget: Budget) -> Job:
    sizes = (64,) if budget.smoke else SIZES
    rows, rounds = (64, 1) if budget.smoke else (ROWS, ROUNDS)
    settings = {"sizes": sizes, "rows": rows, "rounds": rounds, "parts": PARTS, "prototypes": PROTOTYPES}

    def work(folder: Path, watch: Watch) -> Scores:
        torch.set_num_threads(1)
        scores: dict[str, float] = {}
        for size in sizes:
            linear, x_LD = nn.Linear(size, 2 * size), torch.randn(rows, size)
            works: dict[str, Callable[[], object]] = {"matmul": partial(_apply, linear, x_LD)}
            for parts, prototypes in product(PARTS, PROTOTYPES):
                quantised = QuantisedLinear(linear, torch.randn(parts, prototypes, size // parts))
                works[f"{parts}-by-{prototypes}"] = partial(_apply, quantised, x_LD)
            watch.tell(f"{len(works)} forms of a map from {size} to {2 * size}")
            scores |= {f"{name}:{size}": times.fastest for name, times in interleaved(works, rounds).items()}
        return scores

    return Job(SPEED, 0, settings, work)


def _apply(module: nn.Module, x_LD: Tensor) -> None:
    with torch.inference_mode():
        module(x_LD)


def _report(done: Sequence[Done]) -> Report:
    found: Found = {
        (one.settings["parts"], one.settings["prototypes"]): one.scores for one in done if "error" in one.scores
    }
    speed = next((one for one in done if one.arm == SPEED), None)
    tables = [_errors(found)] if found else []
    if speed is not None:
        tables.append(_speeds(speed))
    panels = (
        ("relative error of the projection", partial(_draw, found, "error")),
        ("bits per byte of a book that was not trained on", partial(_draw, found, "bits_per_byte")),
    )
    return Report(tuple(tables), NOTES, panels if found else ())


def _errors(found: Found) -> Table:
    rows = []
    for (parts, prototypes), scores in sorted(found.items()):
        bits, exact = scores["bits_per_byte"], scores["exact_bits_per_byte"]
        rows.append((str(parts), str(prototypes), f"{scores['error']:.3f}", f"{bits:.3f}", f"{bits - exact:+.3f}"))
    columns = ("parts S", "prototypes C", "relative error of the projection", "bits per byte", "above the exact model")
    return Table(f"A language model of s4d layers, width {WIDTH}, all projections quantised", columns, tuple(rows))


def _speeds(speed: Done) -> Table:
    rows = []
    for size, parts, prototypes in product(speed.settings["sizes"], PARTS, PROTOTYPES):
        matmul, taken = speed.scores[f"matmul:{size}"], speed.scores[f"{parts}-by-{prototypes}:{size}"]
        operations = size * 2 * size * 2 / (2 * size * prototypes + 2 * parts * size)
        cells = (f"{1e3 * matmul:.2f}", f"{1e3 * taken:.2f}", f"{matmul / taken:.2f}", f"{operations:.1f}")
        rows.append((f"{size} to {2 * size}", str(parts), str(prototypes), *cells))
    title = f"{speed.settings['rows']:,} vectors on one core, finding the prototypes included"
    columns = ("map", "parts S", "prototypes C", "product, ms", "lookups, ms", "times as fast", "fewer operations")
    return Table(title, columns, tuple(rows))


def _draw(found: Found, what: str, axes: Axes) -> None:
    for parts in sorted({parts for parts, _ in found}):
        points = {c: scores[what] for (s, c), scores in sorted(found.items()) if s == parts}
        axes.plot(list(points), list(points.values()), marker="o", label=f"{parts} parts")
    if what == "bits_per_byte":
        exact = next(iter(found.values()))["exact_bits_per_byte"]
        axes.axhline(exact, color="black", linestyle=":", label="exact")
    axes.set(xscale="log", xlabel="prototypes of each part")
    axes.legend(fontsize=8)


NOTES = (
    f"Quantised is the dense map behind the state space, from {WIDTH} numbers to twice as many, of all layers. The "
    f"model is trained {STEPS} steps on the books; prototypes are of {FIRST_TOKENS:,} tokens of a book that it was "
    "trained on, errors and bits of another one that it was not. Nothing is trained after.",
    "The paper proposes it without an experiment. Recurrences are left exact: an error there would be carried on.",
    "Lookups are torch's embedding_bag; a kernel that keeps tables in registers (MADDNESS) would be faster.",
)

QUANTISED_PROJECTION = Experiment(
    name="uv-quantised",
    question=(
        "A Unified View of Long-Sequence Models, Sec. 7.4: what do prototypes and lookups in place of a state-space "
        "layer's projection cost in quality, and are they faster?"
    ),
    tests=("papers/tests/test_quantised_projection.py",),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)

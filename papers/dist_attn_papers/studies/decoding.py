"""Decoding: tokens per second and memory against transformers' GPT-2 with its cache, and a token's time by position."""

from collections.abc import Callable, Mapping

import torch

from benchmarks.measured import Found, Panel, Table
from benchmarks.peers import absent
from benchmarks.timing import RATES, Roofline, Times, interleaved, rate_works
from dist_attn_papers.studies.decoding_forms import CachedForm, Form, Gpt2Form, Sizes, StateForm, language_model

__all__ = ["NAME", "QUESTION", "TESTS", "forms", "measure", "ratios_of", "step_costs"]

NAME = "decode"
QUESTION = (
    "How many tokens a second does a model of states decode, against keys and values cached, behind 2,048 tokens? 6 "
    "layers, 512 wide, 8 heads of 64, MLP 2,048, vocabulary 32,768, 64 random vectors, greedy, random weights."
)
TESTS = (
    "papers/tests/test_decoding.py",
    "tests/ops/test_linear_attention.py",
    "tests/models/test_language_model.py",
)
BATCHES, LENGTH, STEPS, ROUNDS = (16, 1), 2_048, 4, 5
NEAR, FAR = 1_000, 1_000_000
SMOKE_SIZES, SMOKE_LENGTH, SMOKE_NEAR, SMOKE_FAR = Sizes(32, 2, 2, 64, 64), 8, 8, 64

EAGER = "ours, float32"
CACHED = "cached, float32"
GPT2 = "gpt2, float32"


def measure(smoke: bool) -> Found:
    """Steps of all forms in turns for each batch; then a state of a thousand tokens against one of a million."""
    sizes, length = (SMOKE_SIZES, SMOKE_LENGTH) if smoke else (Sizes(), LENGTH)
    steps, rounds = (2, 1) if smoke else (STEPS, ROUNDS)
    missing = dict(absent("transformers"))
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    tables: list[Table] = []
    notes: list[str] = []
    curves: dict[str, dict[float, float]] = {}
    for batch in BATCHES:
        found, reasons = forms(sizes, batch, length, room=steps * (rounds + 1), compiled=not smoke)
        missing |= reasons
        works: dict[str, Callable[[], object]] = {name: form.steps(steps) for name, form in found.items()}
        times = interleaved({**works, **rate_works()}, rounds)
        seconds = {name: one.median / steps for name, one in times.items() if name not in RATES}
        held = {name: form.held_bytes for name, form in found.items()}
        ratios |= ratios_of(batch, seconds, held)
        numbers |= {f"batch {batch}, {name}, seconds a step": value for name, value in seconds.items()}
        numbers |= {f"batch {batch}, {name}, bytes held": value for name, value in held.items()}
        tables.append(_table(batch, length, times, seconds, found))
        for name, value in seconds.items():
            curves.setdefault(name, {})[float(batch)] = batch / value
        flops, moved = step_costs(sizes, batch)
        notes.append(Roofline.of(times).line(f"a step of {batch} in float32", flops, moved, seconds[EAGER]))
        del found, works
        # A compiler keeps so many versions of one function and no more; those of this batch are done with.
        torch.compiler.reset()
    near, far = (SMOKE_NEAR, SMOKE_FAR) if smoke else (NEAR, FAR)
    model = language_model(sizes)
    by_position = {str(read): StateForm(model, 1, read).steps(steps) for read in (near, far)}
    near_s, far_s = (one.median / steps for one in interleaved(by_position, 4 * rounds).values())
    ratios["1M / 1k"] = round(far_s / near_s, 4)
    numbers |= {f"seconds a step at {near}": near_s, f"seconds a step at {far}": far_s}
    notes += [
        f"A step at {far:,} tokens against one at {near:,}, batch 1, each from a state that has really read them: "
        f"{1e3 * far_s:.2f} ms and {1e3 * near_s:.2f} ms.",
        "gpt2 is transformers' model with its dynamic cache and SDPA, which is copied at every token; `cached` keeps "
        "keys and values in caches allocated once and writes one row a step. Targets compare with `cached`, both eager "
        "in float32, and the fastest form of each, whatever its precision.",
        "Held: caches or states, without weights. Medians of rounds taken in turns. Compiling is faster where torch "
        "has kept on disk what it compiled before.",
    ]
    panel = Panel("tokens a second by batch", "batch", "tokens/s", curves)
    return Found(tuple(tables), ratios, numbers, (panel,), tuple(notes), missing)


def forms(
    sizes: Sizes, batch: int, length: int, *, room: int, compiled: bool
) -> tuple[dict[str, Form], dict[str, str]]:
    """Every form that can run here, having read `length` tokens, with room for more; why the others cannot."""
    found: dict[str, Form] = {}
    reasons = {}
    ours = ("float32", "bfloat16", "int8")
    for precision in ours:
        found[f"ours, {precision}"] = StateForm(language_model(sizes, precision), batch, length)
    for precision in ours if compiled else ():
        name = f"ours, {precision}, compiled"
        try:
            found[name] = StateForm(language_model(sizes, precision), batch, length, compiled=True)
        except Exception as error:  # a compiler that is missing or refuses is a reason, not a failure of the others
            reasons[name] = f"it could not be compiled: {type(error).__name__}: {error}"[:300]
    for precision in ("float32", "bfloat16"):
        found[f"cached, {precision}"] = CachedForm(sizes, batch, length, room, precision)
        if not absent("transformers"):
            found[f"gpt2, {precision}"] = Gpt2Form(sizes, batch, length, room, precision)
    return found, reasons


def ratios_of(batch: int, seconds: Mapping[str, float], held: Mapping[str, int]) -> dict[str, float]:
    """What targets and later runs look at: the same precision and both eager, or the fastest form of each."""
    ours, theirs = ({n: s for n, s in seconds.items() if n.startswith("ours") is own} for own in (True, False))
    ratios = {
        f"batch {batch}, cached / ours, eager float32": round(seconds[CACHED] / seconds[EAGER], 3),
        f"batch {batch}, cached / ours, fastest of each": round(min(theirs.values()) / min(ours.values()), 3),
    }
    if GPT2 in seconds:
        ratios |= {
            f"batch {batch}, gpt2 / ours, eager float32": round(seconds[GPT2] / seconds[EAGER], 3),
            f"batch {batch}, memory ours / gpt2": round(held[EAGER] / held[GPT2], 5),
        }
    return ratios


def step_costs(sizes: Sizes, batch: int) -> tuple[float, float]:
    """Operations, and bytes at the least: all weights once, every state read and written, all in float32."""
    costs = sizes.costs
    return batch * costs.decode_flops().total, costs.weights_bytes + 2.0 * costs.state_bytes(batch=batch)


def _table(
    batch: int, length: int, times: Mapping[str, Times], seconds: Mapping[str, float], found: Mapping[str, Form]
) -> Table:
    against = seconds.get(GPT2)
    rows = []
    for name, value in seconds.items():
        times_gpt2 = "–" if against is None else f"{against / value:.2f}x"
        form = found[name]
        compile_s = f"{form.compile_s:.0f} s" if form.compile_s else ""
        cells = (f"{1e3 * value:.2f} ms", f"{batch / value:,.0f}", times_gpt2, f"{form.held_bytes / 1e6:,.1f} MB")
        rows.append((name, *cells, compile_s, f"{times[name].spread:.0%}"))
    columns = ("form", "a step", "tokens/s", "tokens/s of gpt2, float32", "held", "compiled in", "spread")
    return Table(f"Batch {batch}, behind {length:,} tokens", columns, tuple(rows))

"""Random Feature Attention, Figures 2 and 3: decoding speed and memory against length, beside keys and values cached.

Long decodes are not run from end to end: steps are timed at positions from the first to the last, with caches as full
as they are there, and a whole decode is the sum over positions of what lies between. At the shortest length a real
decode says whether that is so.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import Axes, Table
from benchmarks.timing import interleaved
from dist_attn_papers.tables.decoding_arms import CachedArm, StateArm, model_settings
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Interrupted, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report

__all__ = ["ARMS", "RFA_DECODING", "SOFTMAX", "whole_seconds"]

# The paper's base size, and its vocabulary.
SIZES = {"width": 512, "layers": 6, "heads": 8, "mlp": 2048, "vocabulary": 32_768}
SMOKE_SIZES = {"width": 32, "layers": 2, "heads": 2, "mlp": 64, "vocabulary": 64}
CAUSAL, CROSS, BATCH = 64, 128, 16
# At 8,192 the caches of softmax take 6.4 GB in float32.
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PRINTED_LENGTH, CHECKED_LENGTH = 2048, 256
# Positions at which steps are timed, as shares of the length, and steps at each.
SHARES, STEPS, ROUNDS = (0.0, 0.25, 0.5, 0.75, 1.0), 6, 4
# Whole decodes of the shortest length, after one that is not counted.
CHECK_ROUNDS = 1
KINDS = ("conditional", "unconditional")

SOFTMAX = "softmax"
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    SOFTMAX: ({"kind": "softmax"}, {"attention": "softmax"}),
    "rfa-gaussian": (
        {"kind": "rfa", "feature": "gaussian", "num_random": CAUSAL},
        {"attention": "rfa", "feature": "gaussian", "num_random": CROSS},
    ),
    "rfa-arccos": (
        {"kind": "rfa", "feature": "arc_cosine", "num_random": CAUSAL},
        {"attention": "rfa", "feature": "arc_cosine", "num_random": CROSS},
    ),
}
OTHERS = tuple(arm for arm in ARMS if arm != SOFTMAX)


def whole_seconds(seconds: Mapping[int, float], length: int) -> float:
    """Of decoding `length` tokens, from the seconds of one step at some positions: straight lines between them.

    Before the first position and after the last one a step takes what it takes there.
    """
    known = sorted(seconds.items())
    inner = sum((b - a) * (at_a + at_b) / 2 for (a, at_a), (b, at_b) in pairwise(known))
    (first, at_first), (last, at_last) = known[0], known[-1]
    return inner + first * at_first + (length - last) * at_last


def _arms(settings: Mapping[str, Any]) -> dict[str, CachedArm | StateArm]:
    length, batch, precision = settings["length"], settings["batch"], settings["precision"]
    sources = length if settings["kind"] == "conditional" else 0
    arms: dict[str, CachedArm | StateArm] = {}
    for name, model in settings["models"].items():
        if name == SOFTMAX:
            arms[name] = CachedArm(model, precision, batch, length, sources)
        else:
            arms[name] = StateArm(model, precision, batch, sources)
    return arms


def _measure(settings: Mapping[str, Any], folder: Path, watch: Watch) -> Scores:
    torch.set_num_threads(settings["threads"])
    arms, length, steps = _arms(settings), settings["length"], settings["steps"]
    scores: dict[str, float] = {}
    for position in (round(share * (length - steps)) for share in settings["shares"]):
        if watch.stop():
            raise Interrupted
        works = {name: partial(arm.steps, position, steps) for name, arm in arms.items()}
        for name, times in interleaved(works, settings["rounds"]).items():
            scores[f"{name}:seconds_at_{position}"] = times.fastest / steps
            scores[f"{name}:median_seconds_at_{position}"] = times.median / steps
        told = ", ".join(f"{name} {1e3 * scores[f'{name}:seconds_at_{position}']:.1f} ms" for name in arms)
        watch.tell(f"at {position}: {told}")
    for name, arm in arms.items():
        scores[f"{name}:held_bytes"] = arm.held_bytes
        scores[f"{name}:peak_bytes"] = arm.peak(length - 1)
        scores[f"{name}:weight_bytes"] = arm.weight_bytes
    sources = length if settings["kind"] == "conditional" else 0
    if sources:
        scores["encode_seconds"] = settings["batch"] * arms[SOFTMAX].encode_seconds(sources)
        watch.tell(f"encoding {settings['batch']} sources: {scores['encode_seconds']:.1f} s")
    if settings["check"]:
        whole = {name: partial(arm.decode, sources, length) for name, arm in arms.items()}
        for name, times in interleaved(whole, settings["check"]).items():
            scores[f"{name}:decode_seconds"] = times.fastest
    return scores


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    # What the paper prints a number for comes first.
    lengths = (8, 16) if budget.smoke else sorted(LENGTHS, key=lambda length: (length != PRINTED_LENGTH, length))
    cells = [(kind, "float32", length) for length in lengths for kind in KINDS]
    cells += [(kind, "bfloat16", lengths[0]) for kind in KINDS]
    jobs = []
    for seed in seeds:
        for kind, precision, length in cells:
            jobs.append(_job(budget, seed, kind, precision, length))
    return jobs


def _job(budget: Budget, seed: int, kind: str, precision: str, length: int) -> Job:
    sizes = SMOKE_SIZES if budget.smoke else SIZES
    models = {
        name: model_settings(sizes, mixer, cross if kind == "conditional" else {})
        for name, (mixer, cross) in ARMS.items()
    }
    settings = {
        "kind": kind,
        "precision": precision,
        "length": length,
        "batch": 2 if budget.smoke else BATCH,
        "shares": SHARES,
        "steps": 2 if budget.smoke else STEPS,
        "rounds": budget.steps(ROUNDS, smoke=1),
        "check": CHECK_ROUNDS if precision == "float32" and length == (8 if budget.smoke else CHECKED_LENGTH) else 0,
        "threads": 1,
        "models": models,
    }
    return Job(f"{kind}-{precision}-{length}", seed, settings, partial(_measure, settings))


def _report(done: Sequence[Done]) -> Report:
    tables, panels = [_claims(done)], []
    for kind in KINDS:
        for precision in ("float32", "bfloat16"):
            # Of several seeds the first one stands in the table; all are filed.
            by_length = {one.settings["length"]: one for one in reversed(done) if _is_of(one, kind, precision)}
            rows = [by_length[length] for length in sorted(by_length)]
            if rows:
                tables += [table(f"{kind}, {precision}", rows) for table in (_speeds, _last_steps, _memory)]
            if len(rows) > 1:
                panels += [
                    (f"{kind}: tokens per second, {precision}", partial(_draw_speed, rows)),
                    (f"{kind}: MB held, {precision}", partial(_draw_memory, rows)),
                ]
    checked = [one for one in done if any(name.endswith(":decode_seconds") for name in one.scores)]
    if checked:
        tables.append(_check(checked))
    return Report(tuple(tables), NOTES, tuple(panels))


def _is_of(one: Done, kind: str, precision: str) -> bool:
    return bool(one.settings["kind"] == kind and one.settings["precision"] == precision)


NOTES = (
    f"{SIZES['layers']} layers (encoder and decoder where conditional), {SIZES['width']} wide, {SIZES['heads']} heads "
    f"of 64, MLP {SIZES['mlp']}, vocabulary {SIZES['vocabulary']:,}: the paper's base size; D = {CAUSAL} causal, "
    f"{CROSS} cross. Greedy, batch {BATCH}, source and target of one length, one core, random weights.",
    "The baseline keeps keys and values in caches allocated once at full length, writes one row a step and calls "
    "torch's fused attention once per attention; the memory's keys and values are projected once. Random features: the "
    "model's own step. Encoding the sources is the same for all, and only in the columns that say so: one source times "
    "the batch.",
    "Steps are timed at five positions with caches as full as there, in turns in one process, fastest round; a whole "
    "decode is the sum of straight lines between them. The last table has real decodes beside that.",
    "Held: caches, or states with the absorbed memory. Peak: held and what a step allocates. Both without weights "
    "unless said. Of bfloat16 are weights and caches; states stay float32.",
)


def _claims(done: Sequence[Done]) -> Table:
    """What is printed for 2,048 tokens beside what was found."""
    rows = []
    for one in sorted(done, key=lambda one: (one.arm, one.seed)):
        if one.settings["length"] == PRINTED_LENGTH:
            speeds = [_rate(one, arm) / _rate(one, SOFTMAX) for arm in OTHERS]
            held, peak = (
                [one.scores[f"{arm}:{what}_bytes"] / one.scores[f"{SOFTMAX}:{what}_bytes"] for arm in OTHERS]
                for what in ("held", "peak")
            )
            printed = ("12x", "less than 10 %") if one.settings["kind"] == "conditional" else ("", "")
            rows.append(
                (
                    f"{one.settings['kind']}, {one.settings['precision']}",
                    printed[0],
                    ", ".join(f"{ratio:.1f}x" for ratio in speeds),
                    printed[1],
                    ", ".join(f"{ratio:.1%}" for ratio in held),
                    ", ".join(f"{ratio:.1%}" for ratio in peak),
                )
            )
    columns = ("", "printed speed", "speed here", "printed memory", "memory held here", "peak here")
    return Table(f"{PRINTED_LENGTH:,} tokens: {', '.join(OTHERS)} over softmax", columns, tuple(rows))


def _step_seconds(one: Done, arm: str, what: str = "seconds") -> dict[int, float]:
    prefix = f"{arm}:{what}_at_"
    return {int(name.removeprefix(prefix)): value for name, value in one.scores.items() if name.startswith(prefix)}


def _rate(one: Done, arm: str, what: str = "seconds") -> float:
    """Tokens per second of a whole decode."""
    length: int = one.settings["length"]
    return float(one.settings["batch"] * length / whole_seconds(_step_seconds(one, arm, what), length))


def _last(one: Done, arm: str) -> float:
    seconds = _step_seconds(one, arm)
    return seconds[max(seconds)]


def _speeds(title: str, rows: Sequence[Done]) -> Table:
    columns = ["length", *(f"{arm}, tokens/s" for arm in ARMS), *(f"{arm} / softmax" for arm in OTHERS)]
    columns += [f"{arm} / softmax {how}" for how in ("by medians", "with encoding") for arm in OTHERS]
    cells = []
    for one in rows:
        rates = {arm: _rate(one, arm) for arm in ARMS}
        medians = {arm: _rate(one, arm, "median_seconds") for arm in ARMS}
        cells.append(
            (
                f"{one.settings['length']:,}",
                *(f"{rate:.0f}" for rate in rates.values()),
                *(f"{rates[arm] / rates[SOFTMAX]:.2f}x" for arm in OTHERS),
                *(f"{medians[arm] / medians[SOFTMAX]:.2f}x" for arm in OTHERS),
                *(_with_encoding(one, arm) for arm in OTHERS),
            )
        )
    return Table(f"Speed of whole decodes, {title}", tuple(columns), tuple(cells))


def _with_encoding(one: Done, arm: str) -> str:
    if "encode_seconds" not in one.scores:
        return ""
    length = one.settings["length"]
    own, softmax = (
        one.scores["encode_seconds"] + whole_seconds(_step_seconds(one, name), length) for name in (arm, SOFTMAX)
    )
    return f"{softmax / own:.2f}x"


def _last_steps(title: str, rows: Sequence[Done]) -> Table:
    columns = ["length", *(f"{arm}, ms" for arm in ARMS), *(f"softmax / {arm}" for arm in OTHERS)]
    cells = []
    for one in rows:
        lasts = {arm: _last(one, arm) for arm in ARMS}
        cells.append(
            (
                f"{one.settings['length']:,}",
                *(f"{1e3 * seconds:.1f}" for seconds in lasts.values()),
                *(f"{lasts[SOFTMAX] / lasts[arm]:.2f}x" for arm in OTHERS),
            )
        )
    return Table(f"The step of the last token, {title}", tuple(columns), tuple(cells))


def _memory(title: str, rows: Sequence[Done]) -> Table:
    columns = ["length"]
    for what in ("held", "peak"):
        columns += [f"{what}: {arm}, MB" for arm in ARMS] + [f"{what}: {arm} / softmax" for arm in OTHERS]
    columns += [f"peak with weights: {arm} / softmax" for arm in OTHERS]
    cells = []
    for one in rows:
        held, peak, weights = (
            {arm: one.scores[f"{arm}:{what}_bytes"] for arm in ARMS} for what in ("held", "peak", "weight")
        )
        cells.append(
            (
                f"{one.settings['length']:,}",
                *(f"{held[arm] / 1e6:.1f}" for arm in ARMS),
                *(f"{held[arm] / held[SOFTMAX]:.1%}" for arm in OTHERS),
                *(f"{peak[arm] / 1e6:.1f}" for arm in ARMS),
                *(f"{peak[arm] / peak[SOFTMAX]:.1%}" for arm in OTHERS),
                *(f"{(peak[arm] + weights[arm]) / (peak[SOFTMAX] + weights[SOFTMAX]):.1%}" for arm in OTHERS),
            )
        )
    return Table(f"Memory of decoding, {title}", tuple(columns), tuple(cells))


def _check(checked: Sequence[Done]) -> Table:
    cells = []
    for one in sorted(checked, key=lambda one: (one.arm, one.seed)):
        for arm in ARMS:
            length, real = one.settings["length"], one.scores[f"{arm}:decode_seconds"]
            told = whole_seconds(_step_seconds(one, arm), length)
            cells.append(
                (one.settings["kind"], str(length), arm, f"{told:.2f}", f"{real:.2f}", f"{told / real - 1:+.1%}")
            )
    columns = ("decoding", "length", "arm", "from steps, s", "whole decode, s", "difference")
    return Table("Whole decodes beside what steps tell", columns, tuple(cells))


def _draw_speed(rows: Sequence[Done], axes: Axes) -> None:
    lengths = [one.settings["length"] for one in rows]
    for arm in ARMS:
        axes.plot(lengths, [_rate(one, arm) for one in rows], "o-", label=arm)
    _finish(axes)


def _draw_memory(rows: Sequence[Done], axes: Axes) -> None:
    lengths = [one.settings["length"] for one in rows]
    for arm in ARMS:
        axes.plot(lengths, [one.scores[f"{arm}:held_bytes"] / 1e6 for one in rows], "o-", label=arm)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of source and target")
    axes.legend(fontsize=8)


RFA_DECODING = Experiment(
    "rfa-decoding",
    "Random Feature Attention, Figures 2 and 3: how much faster than with cached keys and values do random features "
    "decode, and in how much less memory?",
    (
        "papers/tests/test_rfa_decoding.py",
        "papers/tests/test_encoder_decoder.py",
        "tests/ops/test_linear_attention.py",
    ),
    _jobs,
    _report,
    seeds=(0,),
)

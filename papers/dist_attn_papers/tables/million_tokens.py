"""A million tokens of the books through every mixer of linear cost, over 4 ranks and on one.

A Unified View of Long-Sequence Models, Table 1, says that mixers and state spaces reach about a million tokens on toy
data. Here each of them does it, and it is asked for its memory, bytes between ranks, time and exactness.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.measured import Axes, Table
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Interrupted, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report
from dist_attn_papers.tables.million_layers import ARMS, HEADS, KEPT_SHARE, WIDTH, formula_bytes
from dist_attn_papers.tables.million_run import Plan, Reading, first_bytes, read_over_ranks, read_whole

__all__ = ["MILLION_TOKENS", "growth"]

FOLDER = Path("data/books")
TOKENS, RANKS, BLOCK = 1 << 20, 4, 1 << 16
SMOKE_TOKENS, SMOKE_BLOCK = 1 << 12, 1 << 9
PARTS = (4, 2, 1)
ONE, MANY = "one", "ranks"


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    tokens = budget.steps(TOKENS, smoke=SMOKE_TOKENS)
    block = SMOKE_BLOCK if budget.smoke else BLOCK
    return [_job(name, max(64, int(arm.share * tokens)), block, seed) for seed in seeds for name, arm in ARMS.items()]


def _job(name: str, tokens: int, block: int, seed: int) -> Job:
    lengths = tuple(tokens // part for part in PARTS)
    settings = {"name": name, "lengths": lengths, "ranks": RANKS, "block": block, "width": WIDTH, "heads": HEADS}

    def work(folder: Path, watch: Watch) -> Scores:
        torch.set_num_threads(1)
        plan = Plan(name, lengths, RANKS, block, seed, folder / "outputs.f32")
        text_L = first_bytes(FOLDER, tokens)
        scores: dict[str, float] = {}
        try:
            for length in lengths:
                if watch.stop():
                    raise Interrupted
                reading = read_whole(plan, text_L[:length])
                watch.tell(f"{length:,} tokens on 1 rank: {reading.seconds:.1f} s")
                scores |= _named(ONE, length, reading)
            for length, reading in zip(lengths, read_over_ranks(plan, text_L), strict=True):
                scores |= _named(MANY, length, reading)
        finally:
            plan.outputs.unlink(missing_ok=True)
        for length in lengths:
            formula = formula_bytes(name, length, RANKS)
            scores |= {} if formula is None else {f"formula:{length}": formula}
        return scores

    return Job(name, seed, settings, work)


def _named(where: str, length: int, reading: Reading) -> dict[str, float]:
    return {f"{where}:{what}:{length}": value for what, value in asdict(reading).items()}


def growth(values: Mapping[int, float]) -> float:
    """The exponent p of value ~ length^p between the shortest and the longest: 1 is linear, 0 does not grow."""
    (short, before), *_, (long, after) = sorted(values.items())
    return math.log(after / before) / math.log(long / short) if before > 0 and after > 0 else 0.0


def _values(one: Done, where: str, what: str) -> dict[int, float]:
    return {length: one.scores[f"{where}:{what}:{length}"] for length in one.settings["lengths"]}


def _report(done: Sequence[Done]) -> Report:
    first = list({one.arm: one for one in reversed(done)}.values())[::-1]
    panels = (
        ("seconds on 4 ranks", _draw(first, "seconds", 1.0)),
        ("bytes that a rank sends", _draw(first, "sent", 1.0)),
        ("peak per rank in MiB, in blocks where it streams", _draw(first, "peak", 2**-20)),
    )
    return Report((_bytes(first), _memory(first), _times(first)), NOTES, panels)


def _bytes(done: Sequence[Done]) -> Table:
    rows = []
    for one in done:
        sent = _values(one, MANY, "sent")
        top = max(sent)
        largest = one.scores[f"{MANY}:largest:{top}"]
        differences = [one.scores[f"{MANY}:{what}:{top}"] for what in ("difference", "streamed_difference")]
        formula = one.scores.get(f"formula:{top}")
        flat = len(set(sent.values())) == 1
        rows.append(
            (
                one.arm,
                f"{top:,}",
                *(f"{bytes_sent:,.0f}" for bytes_sent in sent.values()),
                "flat" if flat else f"L^{growth(sent):.2f}",
                "–" if formula is None else f"{formula:,.0f}",
                f"{differences[0]:.1e}",
                f"{differences[1]:.1e}" if ARMS[one.arm].streams else "",
                f"{largest:.3g}",
            )
        )
    columns = ("mixer", "tokens L", "sent, L/4", "L/2", "L", "grows", "by formula at L", "largest difference to 1 rank")
    return Table(
        f"What a rank of {RANKS} sends, in bytes, and what ranks change",
        (*columns, "the same in blocks", "largest output"),
        tuple(rows),
    )


def _memory(done: Sequence[Done]) -> Table:
    rows = []
    for one in done:
        alone, whole = _values(one, ONE, "peak"), _values(one, MANY, "peak")
        cells = [f"{2**-20 * alone[max(alone)]:,.1f}", *(f"{2**-20 * peak:,.1f}" for peak in whole.values())]
        if ARMS[one.arm].streams:
            streamed = _values(one, MANY, "streamed_peak")
            cells += [f"{2**-20 * peak:,.2f}" for peak in streamed.values()]
            cells.append("flat" if abs(growth(streamed)) < 0.01 else f"L^{growth(streamed):.2f}")
            cells.append(f"{one.scores[f'{MANY}:streamed_sent_per_block:{max(whole)}']:,.0f}")
        else:
            cells += [""] * (len(PARTS) + 2)
        rows.append((one.arm, *cells))
    columns = ["mixer", "1 rank, L", *(f"{RANKS} ranks, {name}" for name in ("L/4", "L/2", "L"))]
    columns += [*(f"in blocks, {name}" for name in ("L/4", "L/2", "L")), "grows", "bytes sent per block"]
    return Table("Peak of tensors above weights per rank, in MiB", tuple(columns), tuple(rows))


def _times(done: Sequence[Done]) -> Table:
    rows = []
    for one in done:
        alone, many = _values(one, ONE, "seconds"), _values(one, MANY, "seconds")
        cells = [*(f"{s:.2f}" for s in alone.values()), f"{growth(alone):.2f}"]
        cells += [*(f"{s:.2f}" for s in many.values()), f"{growth(many):.2f}"]
        rows.append((one.arm, f"{max(alone):,}", *cells))
    columns = ["mixer", "tokens L"]
    for ranks in ("1 rank", f"{RANKS} ranks"):
        columns += [f"{ranks}, L/4", "L/2", "L", "exponent"]
    return Table("Seconds, and the exponent of L between L/4 and L", tuple(columns), tuple(rows))


def _draw(done: Sequence[Done], what: str, unit: float) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, one in enumerate(done):
            name = "streamed_peak" if what == "peak" and ARMS[one.arm].streams else what
            values = {length: unit * value for length, value in _values(one, MANY, name).items() if value > 0}
            style = "-" if ARMS[one.arm].carries else "--"
            axes.plot(list(values), list(values.values()), style, marker="o", color=f"C{number}", label=one.arm)
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.legend(fontsize=6, ncols=2)

    return draw


NOTES = (
    f"One layer of width {WIDTH} ({HEADS} heads, other options as they are by default), float32, forward, over the "
    f"first bytes of the books; weights are drawn, not trained. {RANKS} ranks are processes over gloo with one thread "
    "each. Where ranks are more than cores, their seconds say how time grows, not what so many machines would gain.",
    "Sent: payload of the rank that sends most, as communicators count it. Memory: tensors that live at the peak, "
    "input and outputs among them, weights not, on the rank that holds most; what a kernel uses inside is not seen.",
    f"In blocks: the same ranks read the sequence in blocks of {BLOCK:,} tokens and carry the state, as the engine "
    "encodes a document: memory does not depend on the length, and bytes are those per block times the blocks.",
    "Differences are those of all outputs to one rank's, which lie in a file and are compared a few at a time.",
    "mlp_mixer has weights for one length, so each length is another layer; s4-convolution's kernel takes N numbers "
    f"for every token and channel, so it reads less. million keeps {KEPT_SHARE:.1%} of the tokens, with as many "
    "experts as those fill; where ranks round differently, a token at the edge of being kept may be dropped.",
)

MILLION_TOKENS = Experiment(
    name="million-tokens",
    question=(
        "Do the mixers whose cost is linear read 1,048,576 tokens over 4 ranks as one rank does, in memory and bytes "
        "per rank that do not grow with the length where a state is carried, and in time that grows with it?"
    ),
    tests=("papers/tests/test_million_tokens.py", "tests/mixers/test_contract.py"),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)

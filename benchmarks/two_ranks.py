"""What a second rank gives: two ranks with a thread each against one, what travels, and how long they wait."""

import statistics

from benchmarks.cases import COSTS
from benchmarks.measured import Found, Panel, Table
from benchmarks.rank_passes import Pass, Passed, run_passes
from benchmarks.setting import own_cores

__all__ = ["NAME", "QUESTION", "TESTS", "measure", "speedup"]

NAME = "two-ranks"
QUESTION = (
    "How much faster than one rank with one thread are two, each kept to a core of its own? B1 H8 d64, 64 random "
    "vectors, float32, causal, feature map included; processes over gloo."
)
TESTS = ("tests/sharded/test_carry_scan.py", "tests/sharded/test_prefix_scan.py")
LENGTH, STEP_LENGTH, SHORT_LENGTH, ROUNDS = 65_536, 32_768, 4_096, 15
SMOKE_LENGTH, SMOKE_STEP, SMOKE_SHORT = 256, 192, 128


def measure(smoke: bool) -> Found:
    """Run the passes; the length of a step is that of 16,384 tokens a rank."""
    length, step, short = (SMOKE_LENGTH, SMOKE_STEP, SMOKE_SHORT) if smoke else (LENGTH, STEP_LENGTH, SHORT_LENGTH)
    passes = [
        *(Pass(length, gated, gradients) for gradients in (False, True) for gated in (False, True)),
        Pass(step, gradients=True),
        Pass(short, alone=False),
    ]
    found = run_passes(passes, 2, 1 if smoke else ROUNDS)
    carry = COSTS.traffic().carry_bytes
    forward, at_step, at_short = found[0], found[4], found[5]
    ratios = {one.name: round(speedup(ranks), 3) for one, ranks in zip(passes[:4], found, strict=False)}
    ratios |= {
        "carry bytes / formula": max(rank.bytes_sent for rank in forward) / carry,
        "carry bytes, longest / shortest": forward[0].bytes_sent / at_short[0].bytes_sent,
        "exposed share": round(max(rank.exposed_share for rank in at_step), 4),
    }
    rows = tuple(_row(one, ranks) for one, ranks in zip(passes, found, strict=True))
    columns = ("pass", "tokens", "1 rank", "2 ranks", "faster", "processor time", "sent by a rank", "exposed")
    notes = [
        f"A rank's element is 4 B H (M (V + 1) + 2) = {carry:,} bytes; a pair swaps one, and backward another.",
        "Medians of rounds in which the first rank does all of it while the second waits, and then both do; the slower "
        "rank counts. Exposed is the larger share of the two: time in exchanges, waiting for the other rank included.",
    ]
    if len(own_cores()) < 2:
        notes.append("This process may use one core only: both ranks shared it, and nothing can be said about speed.")
    curves = {
        "1 rank": {float(n): _alone(ranks) for n, ranks in enumerate(found, 1) if ranks[0].alone_s},
        "2 ranks": {float(n): _together(ranks) for n, ranks in enumerate(found, 1)},
    }
    numbers = {
        f"{one.name} of {one.length}, rank {rank}, {what}": value
        for one, ranks in zip(passes, found, strict=True)
        for rank, passed in enumerate(ranks)
        for what, value in passed.numbers.items()
    }
    panel = Panel("time of the passes, in the order of the table", "pass", "seconds", curves)
    return Found((Table("Passes", columns, rows),), ratios, numbers, (panel,), tuple(notes))


def speedup(ranks: list[Passed]) -> float:
    """One rank's seconds over those of the slower of all together."""
    return _alone(ranks) / _together(ranks)


def _alone(ranks: list[Passed]) -> float:
    return statistics.median(ranks[0].alone_s)


def _together(ranks: list[Passed]) -> float:
    """In every round the slowest rank counts."""
    slowest: list[float] = [max(of_round) for of_round in zip(*(r.together_s for r in ranks), strict=True)]
    return statistics.median(slowest)


def _row(one: Pass, ranks: list[Passed]) -> tuple[str, ...]:
    alone = faster = "–"
    if ranks[0].alone_s:
        alone, faster = f"{_alone(ranks):.3f} s", f"{speedup(ranks):.2f}x"
    cpu = sum(statistics.median(rank.cpu_s) for rank in ranks)
    exposed = max(rank.exposed_share for rank in ranks)
    sent = max(rank.bytes_sent for rank in ranks)
    cells = (alone, f"{_together(ranks):.3f} s", faster, f"{cpu:.3f} s", f"{sent:,}", f"{exposed:.1%}")
    return (one.name, f"{one.length:,}", *cells)

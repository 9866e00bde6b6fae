"""`make bench-quick`: whether a few ratios are still what was filed; a loss of more than 15 % fails.

Only ratios of one run are compared, never seconds of two. What was filed on another machine, or with another number of
threads, is no measure of today's run and is named as such.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.cases import CASES
from benchmarks.filed import RESULTS, filed_results, latest, ratios_of
from benchmarks.report import measure
from benchmarks.setting import ROOT, Setting, look_around, why_red

__all__ = ["QUICK", "Comparison", "Watched", "better", "compare", "main", "measure_now", "table"]

MOST_LOSS = 0.15
# Of each core, left over by the tests that ran just before; ratios taken beside other work scatter by a third.
MOST_LOAD = 0.9
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Watched:
    """A ratio that is looked at, and which way is better."""

    case: str
    ratio: str
    better: Better


# Of cases whose one size takes seconds; the shortest first, since what larger ones leave to the allocator slows them.
# Together under five minutes on two cores, tests included.
QUICK = (
    Watched("forward", "sdpa / ours at 2048", "higher"),
    Watched("forward", "sdpa / ours at 8192", "higher"),
    Watched("forward", "ours / limit at 8192", "lower"),
    Watched("backward", "sdpa / ours at 2048", "higher"),
    Watched("backward", "ours / limit at 2048", "lower"),
    Watched("step", "transformers / ours at 1", "higher"),
    Watched("step", "transformers / ours at 8", "higher"),
    Watched("encoder", "transformers / ours at 4096", "higher"),
)
TESTS = (
    "tests/ops/test_linear_attention.py", "tests/test_feature_maps.py", "tests/ops/test_decode_step.py",
    "tests/ops/test_fused_encoder.py",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A watched ratio, filed and now; None: nothing was filed, or nothing was measured."""

    watched: Watched
    filed: float | None
    now: float | None

    @property
    def loss(self) -> float | None:
        """The share that was lost: 0.1 is a tenth worse, -0.1 a tenth better."""
        if not self.filed or not self.now:
            return None
        return 1 - self.now / self.filed if self.watched.better == "higher" else 1 - self.filed / self.now

    def failed(self, most_loss: float = MOST_LOSS) -> bool:
        """Whether more was lost than is allowed, or a ratio that was filed could not be measured any more."""
        if self.filed is not None and not self.now:
            return True
        return self.loss is not None and self.loss > most_loss


def compare(
    watched: Sequence[Watched],
    filed: Sequence[Mapping[str, Any]],
    now: Mapping[str, Mapping[str, float]],
    setting: Setting,
) -> list[Comparison]:
    """Every watched ratio beside the newest filed one of this machine and number of threads; `now` is by case."""
    found = []
    for one in watched:
        before = ratios_of(latest(filed, one.case, setting) or {}).get(one.ratio)
        found.append(Comparison(one, before, now.get(one.case, {}).get(one.ratio)))
    return found


def table(comparisons: Sequence[Comparison], most_loss: float = MOST_LOSS) -> str:
    """One line for each, the failed ones marked."""
    lines = ["| case | ratio | better | filed | now | change | |", "|---|---|---|---|---|---|---|"]
    for one in comparisons:
        change = "" if one.loss is None else f"{-one.loss:+.1%}"
        if one.failed(most_loss):
            word = "LOST" if one.now else "GONE"
        else:
            word = "not filed for this machine" if one.filed is None else "ok"
        filed, now = ("–" if value is None else f"{value:.2f}" for value in (one.filed, one.now))
        cells = (one.watched.case, one.watched.ratio, one.watched.better, filed, now, change, word)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure_now(watched: Sequence[Watched], rounds: int) -> dict[str, dict[str, float]]:
    """Every case at the sizes that are watched, with no more rounds than is filed."""
    found = {}
    for name in dict.fromkeys(one.case for one in watched):
        sizes = sorted({int(one.ratio.rpartition(" ")[2]) for one in watched if one.case == name})
        case = CASES[name]
        # The fastest of fewer rounds is slower.
        rounds_here = case.rounds if case.statistic == "fastest" else min(rounds, case.rounds)
        found[name] = dict(measure(case, sizes, rounds_here).ratios)
    return found


def better(
    watched: Sequence[Watched], first: Mapping[str, Mapping[str, float]], second: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """The first ratios, these replaced where the second is better: what is lost is so twice, what scatters is not."""
    found = {case: dict(ratios) for case, ratios in first.items()}
    for one in watched:
        values = [r for r in (found.get(one.case, {}).get(one.ratio), second.get(one.case, {}).get(one.ratio)) if r]
        if values:
            found.setdefault(one.case, {})[one.ratio] = max(values) if one.better == "higher" else min(values)
    return found


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 nothing was lost, 1 the tests are red or something was lost, 2 there was nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description="Compare with what was filed.")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of every size; default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's; default: its own choice")
    parser.add_argument("--most-loss", type=float, default=MOST_LOSS, metavar="SHARE", help="default: %(default)s")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    problem = why_red(TESTS)
    if problem:
        print(f"bench-quick: no number without green tests; {problem}", file=sys.stderr)
        return 1
    setting = look_around()
    if setting.load_average > MOST_LOAD * setting.cores:
        print(
            f"bench-quick: the load is {setting.load_average:g} on {setting.cores} cores before anything is measured; "
            "what is lost may be lost to other work: run it again on a quiet machine",
            file=sys.stderr,
        )
    filed, now = filed_results(ROOT / RESULTS), measure_now(QUICK, given.rounds)
    comparisons = compare(QUICK, filed, now, setting)
    lost = [one.watched for one in comparisons if one.failed(given.most_loss)]
    if lost:
        print(f"bench-quick: measured again: {', '.join(f'{one.case}: {one.ratio}' for one in lost)}", file=sys.stderr)
        comparisons = compare(QUICK, filed, better(lost, now, measure_now(lost, given.rounds)), setting)
    print(f"{setting.sentence()}\n\n{table(comparisons, given.most_loss)}")
    return verdict(comparisons, given.most_loss)


def verdict(comparisons: Sequence[Comparison], most_loss: float) -> int:
    """The exit code for these, with a sentence."""
    lost = [one for one in comparisons if one.failed(most_loss)]
    if lost:
        names = ", ".join(f"{one.watched.case}: {one.watched.ratio}" for one in lost)
        print(f"bench-quick: more than {most_loss:.0%} was lost at {names}", file=sys.stderr)
        return 1
    if all(one.filed is None for one in comparisons):
        print(
            "bench-quick: nothing was filed on this machine with as many threads; file results by "
            f'`make bench ARGS="{" ".join(dict.fromkeys(one.watched.case for one in comparisons))}"` first',
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

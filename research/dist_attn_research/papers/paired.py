"""Claims that one arm of a comparison is better than another, judged over the seeds that both have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import ClassVar

from dist_attn_research.papers.experiment import Done
from dist_attn_research.papers.finding import mean_and_spread

__all__ = ["Claim", "judge"]

# Student's t, two-sided at 5 %, by degrees of freedom; above nine, that of nine.
_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Claim:
    """What is printed, and which arm is then better than which by a score: less of it, or more where that is better."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("the paper", "first", "second", "difference", "same sign here")

    printed: str
    better: str
    worse: str
    score: str
    more: bool = False


def judge(done: Sequence[Done], claim: Claim) -> tuple[str, ...]:
    """A row under `Claim.COLUMNS`: the difference over the seeds that both arms have, and whether it has the sign.

    A difference whose interval of 95 % (Student's, paired by seed) holds 0 is not told from noise.
    """
    scores = {(one.arm, one.seed): one.scores.get(claim.score) for one in done}
    seeds = sorted({one.seed for one in done})
    pairs = [(scores.get((claim.better, seed)), scores.get((claim.worse, seed))) for seed in seeds]
    sign = -1 if claim.more else 1
    gains = [sign * (worse - better) for better, worse in pairs if better is not None and worse is not None]
    return (claim.printed, claim.better, claim.worse, mean_and_spread(gains), _verdict(gains))


def _verdict(gains: Sequence[float]) -> str:
    if not gains:
        return "not measured"
    mean = fmean(gains)
    says = "yes" if mean > 0 else "no, the opposite"
    if len(gains) == 1:
        return f"{says} (one seed)"
    reach = _STUDENT[min(len(gains) - 1, len(_STUDENT)) - 1] * stdev(gains) / math.sqrt(len(gains))
    return says if abs(mean) > reach else "not told from noise"

"""A race of a case's works: the same sizes, rounds in turns, memory where the case asks for it."""

from collections.abc import Sequence

from benchmarks.cases import Case
from benchmarks.memory import peak_bytes
from benchmarks.report import Result, Row, row_of
from benchmarks.roofline import RATES
from benchmarks.setting import look_around
from benchmarks.timing import interleaved

__all__ = ["measure"]


def measure(case: Case, sizes: Sequence[int], rounds: int) -> Result:
    """Run the case at these sizes."""
    setting = look_around()
    rows = tuple(_measure_size(case, size, rounds) for size in sizes)
    return Result(case.name, case.question, rounds, setting, rows, case.statistic, case.absent())


def _measure_size(case: Case, size: int, rounds: int) -> Row:
    works = case.works(size)
    times = interleaved(works, rounds, budget_s=case.budget_s)
    measured = (name for name in works if name not in RATES) if case.memory else ()
    return row_of(case, size, times, {name: peak_bytes(works[name]) for name in measured})

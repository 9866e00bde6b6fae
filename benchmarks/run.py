"""`python -m benchmarks.run [CASE …]`: verify, measure, print and file; without a case, all of them.

An experiment's name goes to `benchmarks.papers`, with all that follows it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import CASES, MATMUL, Case
from benchmarks.memory import peak_bytes
from benchmarks.report import Result, Row, as_json, as_markdown, file_finding, file_result, look_around, row_of
from benchmarks.studies import STUDIES, Study
from benchmarks.timing import interleaved
from benchmarks.verify import why_red
from dist_attn.errors import ConfigError

__all__ = ["main", "measure"]


def measure(case: Case, sizes: Sequence[int], rounds: int) -> Result:
    """Run the case at these sizes."""
    setting = look_around()
    rows = tuple(_measure_size(case, size, rounds) for size in sizes)
    return Result(case.name, case.question, rounds, setting, rows, case.statistic)


def _measure_size(case: Case, size: int, rounds: int) -> Row:
    works = case.works(size)
    times = interleaved(works, rounds, budget_s=case.budget_s)
    measured = (name for name in works if name != MATMUL) if case.memory else ()
    return row_of(case, size, times, {name: peak_bytes(works[name]) for name in measured})


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 measured, 1 the tests are red, 2 no such case or folder, or texts that are missing.

    Of experiments also 3: not all is done yet.
    """
    # Here, because some experiments measure cases.
    from benchmarks.papers import __main__ as papers
    from benchmarks.papers.experiments import EXPERIMENTS

    if arguments and arguments[0] in EXPERIMENTS:
        return papers.main(arguments)
    known: dict[str, Case | Study] = {**CASES, **STUDIES}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure, once the tests are green.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too, as a JSON list")
    parser.add_argument("--smoke", action="store_true", help="smallest size, one round, nothing filed: does it run?")
    given = parser.parse_args(arguments)
    names = given.cases or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"benchmarks: there is no case {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if given.json is not None and not given.json.parent.is_dir():
        print(f"benchmarks: the folder of {given.json} does not exist; make it first", file=sys.stderr)
        return 2
    cases = [known[name] for name in names]
    tests = list(dict.fromkeys(test for case in cases for test in case.tests))
    print(f"tests first: {' '.join(tests)}", file=sys.stderr, flush=True)
    problem = why_red(tests)
    if problem:
        print(f"benchmarks: no number without green tests; {problem}", file=sys.stderr)
        return 1
    results, missing = [], False
    for case in cases:
        try:
            results.append(_carry_out(case, smoke=given.smoke))
        except ConfigError as error:  # a study whose texts are not there; the others go on
            print(f"benchmarks: {case.name} was left out: {error}", file=sys.stderr)
            missing = True
    if given.json is not None:
        given.json.write_text(f"[{','.join(results)}]\n")
    return 2 if missing else 0


def _carry_out(case: Case | Study, *, smoke: bool) -> str:
    """Measure, print and, unless it is only asked whether it runs, file; the result as JSON."""
    if isinstance(case, Study):
        finding = case.measure(smoke)
        print(finding.as_markdown(), flush=True)
        path = None if smoke else file_finding(finding)
        result_json = finding.as_json()
    else:
        result = measure(case, case.sizes[:1], 1) if smoke else measure(case, case.sizes, case.rounds)
        print(as_markdown(result), flush=True)
        path = None if smoke else file_result(result)
        result_json = as_json(result)
    if path is not None:
        print(f"filed as {path}", file=sys.stderr)
    return result_json


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m benchmarks.run [CASE …]`: verify, measure, print and file; without a case, all of them."""

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks import delta, flat_memory, two_ranks
from benchmarks.cases import CASES, Case
from benchmarks.measured import Finding, Study, studies_of
from benchmarks.report import file_finding, measure
from benchmarks.setting import own_cores, pin_to, why_red
from dist_attn.errors import ConfigError

__all__ = ["STUDIES", "main"]

STUDIES = studies_of(delta, flat_memory, two_ranks)


def main(
    arguments: Sequence[str], more: Mapping[str, Case | Study] | None = None, others: Mapping[str, str] | None = None
) -> int:
    """The exit code: 0 measured, 1 the tests are red, 2 no such case or folder, or texts that are missing.

    `more` are cases and studies beside those of this folder; `others` are questions by name, listed with the cases.
    """
    known: dict[str, Case | Study] = {**CASES, **STUDIES, **(more or {})}
    given = _parser(known).parse_args(arguments)
    if given.list:
        questions = {name: one.question for name, one in known.items()} | dict(others or {})
        print("\n".join(f"{name}: {question}" for name, question in questions.items()))
        return 0
    names = given.cases or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        names = ", ".join([*known, *(others or {})])
        hint = "" if more else "; papers and other studies are in papers/: `dist-attn bench` finds them where it is"
        print(f"benchmarks: there is no case {unknown[0]!r}; there are {names}{hint}", file=sys.stderr)
        return 2
    if given.json is not None and not given.json.parent.is_dir():
        print(f"benchmarks: the folder of {given.json} does not exist; make it first", file=sys.stderr)
        return 2
    cores = _cores(given.cores)
    if cores is None:
        print(f"benchmarks: no cores {given.cores!r}; this process may use {own_cores()}", file=sys.stderr)
        return 2
    if cores:
        pin_to(cores)
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


def _parser(known: Collection[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure, once the tests are green.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too, as a JSON list")
    parser.add_argument("--smoke", action="store_true", help="smallest size, one round, nothing filed: does it run?")
    parser.add_argument("--list", action="store_true", help="name the cases and what each asks, and run none")
    parser.add_argument(
        "--cores",
        metavar="0,1",
        default="",
        help="keep to these cores, with a thread for each; by default torch's choice",
    )
    return parser


def _cores(text: str) -> tuple[int, ...] | None:
    """The cores that are named; none is no choice, None what is no list of cores of ours."""
    try:
        cores = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        return None
    return cores if set(cores) <= set(own_cores()) else None


def _carry_out(case: Case | Study, *, smoke: bool) -> str:
    """Measure, print and, unless it is only asked whether it runs, file; the result as JSON."""
    finding: Finding
    if isinstance(case, Study):
        finding = case.carry_out(smoke=smoke)
    else:
        finding = measure(case, case.sizes[:1], 1) if smoke else measure(case, case.sizes, case.rounds)
    print(finding.as_markdown(), flush=True)
    if not smoke:
        print(f"filed as {file_finding(finding)}", file=sys.stderr)
    return finding.as_json()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

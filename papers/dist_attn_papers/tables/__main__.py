"""`dist-attn bench NAME …`: do what is not done, report what is, file it when all of it is there."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from benchmarks.report import file_finding
from benchmarks.setting import look_around, why_red
from dist_attn.errors import DistAttnError
from dist_attn.launchers import stop_on_signals
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job
from dist_attn_papers.tables.experiments import EXPERIMENTS
from dist_attn_papers.tables.finding import TableFinding
from dist_attn_papers.tables.runner import carry_out, take_over

__all__ = ["main"]

DONE, RED, BAD, UNFINISHED = 0, 1, 2, 3


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 all done, 1 the tests are red, 2 bad input or missing texts, 3 stopped, late or failed."""
    given = _parser().parse_args(arguments)
    unknown = [name for name in given.names if name not in EXPERIMENTS]
    if unknown:
        print(f"papers: there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return BAD
    experiments = [EXPERIMENTS[name] for name in given.names or EXPERIMENTS]
    if bad := _bad_arm(experiments, given) or _bad_folder(given.out):
        print(f"papers: {bad}", file=sys.stderr)
        return BAD
    if not given.report and not given.untested and (problem := why_red(_tests(experiments))):
        print(f"papers: no number without green tests; {problem}", file=sys.stderr)
        return RED
    codes = [_one(experiment, given) for experiment in experiments]
    return max(codes)


def _one(experiment: Experiment, given: argparse.Namespace) -> int:
    folder = given.out / (f"{experiment.name}-smoke" if given.smoke else experiment.name)
    deadline = time.monotonic() + 60 * given.minutes if given.minutes is not None else None
    try:
        every = _every_job(experiment, given)
        for filed in given.begin_with:
            for job in take_over(folder, every, filed):
                print(f"papers: {experiment.name}: {job.key} is taken from {filed}", file=sys.stderr)
        jobs = [job for job in every if not given.only or job.arm in given.only]
        with stop_on_signals() as asked:
            over = (lambda: True) if given.report else (lambda: asked() or _is_past(deadline))
            carry_out(folder, jobs, over)
        done, left = carry_out(folder, every, lambda: True)
        return _report(experiment, given, done, left)
    except DistAttnError as error:
        print(f"papers: {experiment.name}: {error}", file=sys.stderr)
        return BAD


def _every_job(experiment: Experiment, given: argparse.Namespace) -> list[Job]:
    return list(experiment.jobs(Budget(given.scale, given.smoke), given.seeds or experiment.seeds))


def _bad_arm(experiments: Sequence[Experiment], given: argparse.Namespace) -> str:
    """What is wrong with an arm of `--only`; empty where some experiment has each of them."""
    if not given.only:
        return ""
    arms = dict.fromkeys(job.arm for experiment in experiments for job in _every_job(experiment, given))
    unknown = [arm for arm in given.only if arm not in arms]
    names = " and ".join(experiment.name for experiment in experiments)
    return f"there is no arm {unknown[0]!r} in {names}; there are {', '.join(arms)}" if unknown else ""


def _bad_folder(out: Path) -> str:
    """Why nothing can be kept there; empty where it can."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {out} cannot be made: {error.strerror}; give a folder"
    return ""


def _report(experiment: Experiment, given: argparse.Namespace, done: Sequence[Done], left: Sequence[Job]) -> int:
    if done:
        report, numbers = experiment.report(done), [asdict(one) for one in done]
        if given.scale != 1:
            told = f"Trained {given.scale:g} times as long: where steps are given below, they are those of --scale 1."
            report = replace(report, notes=(told, *report.notes))
        command = _command(experiment, given)
        name = experiment.name + (f"-scale-{given.scale:g}" if given.scale != 1 else "")
        finding = TableFinding(name, experiment.question, command, look_around(), report, numbers)
        print(finding.as_markdown(), flush=True)
        if not given.smoke and (given.report or not left):
            print(f"filed as {file_finding(finding)}", file=sys.stderr)
    for job in left:
        print(f"papers: {experiment.name}: {job.key} is still to be done", file=sys.stderr)
    return UNFINISHED if left else DONE


def _command(experiment: Experiment, given: argparse.Namespace) -> str:
    seeds = f" --seeds {','.join(map(str, given.seeds))}" if given.seeds else ""
    scale = f" --scale {given.scale:g}" if given.scale != 1 else ""
    return f"python -m dist_attn_papers.tables {experiment.name}{seeds}{scale}"


def _tests(experiments: Sequence[Experiment]) -> list[str]:
    return list(dict.fromkeys(test for experiment in experiments for test in experiment.tests))


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _seeds(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of seeds; give each once, such as 0,1,2")
    return [int(part) for part in parts]


class _OneLine(argparse.ArgumentParser):
    """A parser whose complaint is one line; what there is stands in `--help`."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD, f"papers: {message}; see --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLine(
        prog="python -m dist_attn_papers.tables",
        description="The papers' tables at small scale. What is done is not done again: stopped by Ctrl-C or\n"
        "--minutes, the same command goes on. Reports and figures go to benchmarks/results.",
        epilog="\n".join(["experiments:", *(f"  {name:20}{one.question}" for name, one in EXPERIMENTS.items())])
        + "\n\nexit codes: 0 all done, 1 the tests are red, 2 bad input or missing texts, 3 stopped, late or failed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="an experiment; default: all, one after the other")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/papers"), help="where jobs keep what they find; default runs/papers"
    )
    parser.add_argument("--seeds", type=_seeds, metavar="S,S…", help="such as 0,1,2; default: the experiment's own")
    parser.add_argument("--scale", type=_positive, default=1.0, help="how many times the steps of training; default 1")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="these arms of the comparison")
    parser.add_argument("--minutes", type=_positive, help="stop after so long; the same command goes on")
    parser.add_argument(
        "--begin-with",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="filed results: their jobs are not done again, where the settings are the same",
    )
    parser.add_argument("--report", action="store_true", help="work no more: report and file what is done")
    parser.add_argument("--smoke", action="store_true", help="the smallest amount of everything: does it run?")
    parser.add_argument("--untested", action="store_true", help="leave out the tests that come before any number")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

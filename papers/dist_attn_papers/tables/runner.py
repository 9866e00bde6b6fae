"""Goes over the jobs of an experiment that are not done yet, one after the other, and can be stopped at any time.

Results that were filed stand for jobs that would find them again: on another machine, or when `--out` is gone.
"""

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.setting import look_around
from dist_attn.errors import ConfigError, DistAttnError
from dist_attn_papers.tables.experiment import RESULT, Done, Interrupted, Job, read_done

__all__ = ["carry_out", "take_over"]

SPENT = "seconds.json"
STARTED = "settings.json"
FAILED = "failed.txt"


@dataclass
class _Telling:
    """The `Watch` of a job: lines on stderr with what is being done."""

    asked_to_stop: Callable[[], bool]
    prefix: str

    def stop(self) -> bool:
        return self.asked_to_stop()

    def tell(self, line: str) -> None:
        print(f"{self.prefix}{line}", file=sys.stderr, flush=True)


def carry_out(folder: Path, jobs: Sequence[Job], stop: Callable[[], bool]) -> tuple[list[Done], list[Job]]:
    """Do what is not done, until `stop()`; what is done and what is left. Results lie in the jobs' folders.

    A second process may be given the same jobs: each takes those that the other has not begun. A job that fails is left
    with its traceback in `failed.txt`, and the others are done.

    Raises: DistAttnError of a job, which says what all of them lack.
    """
    for number, job in enumerate(jobs, start=1):
        if stop():
            break
        if read_done(folder, job) is not None or any(not _is_done(folder, key) for key in job.needs):
            continue
        with _held(folder / job.key) as ours:
            if not ours or read_done(folder, job) is not None:
                continue
            watch = _Telling(stop, f"[{number}/{len(jobs)} {job.key}] ")
            try:
                _do(folder / job.key, job, watch)
            except Interrupted:
                watch.tell("stopped; the same command goes on with it")
                break
            except DistAttnError:
                raise
            except Exception as error:
                _replace(folder / job.key / FAILED, traceback.format_exc())
                watch.tell(f"failed, {type(error).__name__}: {error} (see {folder / job.key / FAILED})")
    found = [(job, read_done(folder, job)) for job in jobs]
    return [done for _, done in found if done is not None], [job for job, done in found if done is None]


def _do(folder: Path, job: Job, watch: _Telling) -> None:
    settings = json.dumps(job.settings)
    begun = folder / STARTED
    if begun.exists() and json.loads(begun.read_bytes()) != json.loads(settings):
        # Begun under other settings: what lies there is of another job.
        _put_away(folder)
    begun.write_text(settings)
    spent = json.loads((folder / SPENT).read_bytes()) if (folder / SPENT).exists() else 0.0
    started = time.perf_counter()
    try:
        scores = dict(job.work(folder, watch))
    except BaseException:
        _replace(folder / SPENT, json.dumps(spent + time.perf_counter() - started))
        raise
    seconds = spent + time.perf_counter() - started
    values = {"scores": scores, "seconds": round(seconds, 1), "settings": job.settings}
    values["setting"] = look_around().sentence()
    _replace(folder / RESULT, json.dumps(values, indent=1))
    watch.tell(f"done in {seconds:.0f} s: " + ", ".join(f"{name} {value:.4g}" for name, value in scores.items()))


def _put_away(folder: Path) -> None:
    """Rename what an earlier setting left, so that nothing is lost and nothing mixed up."""
    before = folder / f"before-{time.time_ns()}"
    before.mkdir()
    for path in folder.iterdir():
        if not path.name.startswith("before-"):
            path.rename(before / path.name)


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def _is_done(folder: Path, key: str) -> bool:
    return (folder / key / RESULT).exists()


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether the folder is ours until the end of the context; another process may be at work in it."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(opened)


def take_over(folder: Path, jobs: Sequence[Job], filed: Path) -> list[Job]:
    """Write the results that `filed` has for jobs that are not done into the jobs' folders; which jobs these are.

    Only the same arm, seed and settings count. A job that one still to be done needs is left out: that one wants the
    models of it, not its numbers.
    Raises: ConfigError when the file cannot be read or is no filed experiment.
    """
    found = _read(filed)
    missing = [job for job in jobs if read_done(folder, job) is None]
    taken = {job.key for job in missing if _of(job, found) is not None}
    while needed := {need for job in missing if job.key not in taken for need in job.needs} & taken:
        taken -= needed
    for job in missing:
        if job.key in taken:
            one = _of(job, found)
            assert one is not None  # as above
            (folder / job.key).mkdir(parents=True, exist_ok=True)
            kept = {name: one[name] for name in ("scores", "seconds", "settings", "setting")}
            (folder / job.key / RESULT).write_text(json.dumps(kept, indent=1))
    return [job for job in missing if job.key in taken]


def _of(job: Job, found: Collection[dict[str, Any]]) -> dict[str, Any] | None:
    settings = json.loads(json.dumps(job.settings))
    same = [one for one in found if (one["arm"], one["seed"], one["settings"]) == (job.arm, job.seed, settings)]
    return same[-1] if same else None


def _read(filed: Path) -> list[dict[str, Any]]:
    try:
        values = json.loads(filed.read_bytes())
    except OSError as error:
        raise ConfigError(f"--begin-with {filed} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--begin-with {filed} is no JSON; give the .json of a filed experiment") from None
    numbers = values.get("numbers") if isinstance(values, dict) else None
    wanted = {"arm", "seed", "scores", "seconds", "settings", "setting"}
    if not isinstance(numbers, list) or not all(isinstance(one, dict) and wanted <= one.keys() for one in numbers):
        raise ConfigError(f"--begin-with {filed} is no filed experiment; give benchmarks/results/paper-….json")
    return numbers

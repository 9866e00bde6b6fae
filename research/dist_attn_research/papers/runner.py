"""Goes over the jobs of an experiment that are not done yet, one after the other, and can be stopped at any time."""

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.setting import look_around
from dist_attn.errors import DistAttnError
from dist_attn_research.papers.experiment import RESULT, Done, Interrupted, Job, read_done

__all__ = ["carry_out"]

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

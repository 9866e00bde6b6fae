"""Results that were filed stand for jobs that would find them again: on another machine, or when `--out` is gone."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dist_attn.errors import ConfigError
from dist_attn_research.papers.experiment import RESULT, Job, read_done

__all__ = ["take_over"]


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

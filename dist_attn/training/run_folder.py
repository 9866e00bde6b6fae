"""The folder of a run: whose it is, and what stands in it when a run begins or goes on."""

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dist_attn.errors import ConfigError
from dist_attn.training.config import EXECUTION, TrainingConfig

__all__ = ["METRICS", "check_folder", "claim_folder", "hold_folder", "read_metrics", "release_folder"]

METRICS = "metrics.jsonl"


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Inside, no other process trains into the folder; a process that is killed lets go of it.

    Raises: ConfigError where one does, or where there can be no such folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # the folder itself is locked: nothing is left behind
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some file systems of networks have no locks: there it is up to the user.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    f"another process trains into {folder}; wait for its end, or give another run.folder"
                ) from None
        yield
    finally:
        os.close(opened)


def check_folder(config: TrainingConfig, resume: bool) -> None:
    """Raises ConfigError for a folder that holds another run, or this one without `resume`."""
    folder, written = config.run.folder, config.model_dump(mode="json")
    path = folder / "config.json"
    try:
        before = _filled_in(json.loads(path.read_bytes())) if path.exists() else None
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be used: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not the configuration of a run; give another run.folder") from None
    if before is not None and not resume:
        raise ConfigError(f"{folder} holds a run already; give --resume to go on with it, or another run.folder")
    if before is not None:
        differing = _differing_sections(before, written)
        if differing:
            raise ConfigError(f"{folder} was started with another [{differing[0]}] section; resume needs the same one")


def claim_folder(config: TrainingConfig, step: int) -> None:
    """Make the folder this run's own, and forget the metrics of steps after `step`, which are about to come again."""
    path = config.run.folder / METRICS
    if path.exists():
        _write_whole(path, "".join(json.dumps(metrics) + "\n" for metrics in read_metrics(config.run.folder, step)))
    written = json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
    _write_whole(config.run.folder / "config.json", written)


def release_folder(folder: Path) -> None:
    """Take back `claim_folder` where a run came to nothing, so that a run of another configuration may begin there."""
    for name in ("config.json", METRICS):
        (folder / name).unlink(missing_ok=True)


def read_metrics(folder: Path, step: float = math.inf) -> list[dict[str, Any]]:
    """The reports of a run up to `step`; half a line at the end, from a run that was killed, is none.

    Raises: ConfigError for a file that is damaged.
    """
    path = folder / METRICS
    if not path.exists():
        return []
    reports = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            continue
        try:
            report = json.loads(line)
            if report["step"] <= step:
                reports.append(report)
        except (KeyError, RecursionError, TypeError, ValueError):
            raise ConfigError(
                f"{path}, line {number} is no report of a run; take the line out, then --resume"
            ) from None
    return reports


def _differing_sections(before: Any, written: dict[str, Any]) -> list[str]:
    if not isinstance(before, dict):
        return list(written)
    run = {key: value for key, value in written["run"].items() if key not in EXECUTION}
    run_before = before.get("run")
    if isinstance(run_before, dict):
        before = {**before, "run": {key: value for key, value in run_before.items() if key not in EXECUTION}}
    return [key for key, value in {**written, "run": run}.items() if before.get(key) != value]


def _filled_in(values: Any) -> Any:
    """A written configuration with the keys that versions since then have by default; as it is where it is none."""
    try:
        return TrainingConfig.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return values


def _write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of the file at once: whoever is killed meanwhile leaves the one that was there."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)

"""The folder of a run: the run it belongs to, its contents as a run begins or goes on, and its best checkpoint.

`checkpoints/best` is a link to `checkpoints/best-NNNNNN`, whose files are those of `step-NNNNNN` under hard links, or
copies where the file system has none, so pruning the others does not touch them. A folder is made beside its place and
renamed, and the link is replaced in one step, so a process killed at any moment leaves a whole best checkpoint, the
one before or the new one.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError

from dist_attn.errors import ConfigError, StorageError
from dist_attn.shipped.folder_files import put_in_place
from dist_attn.training.checkpointing import latest_checkpoint
from dist_attn.training.config import EXECUTION, TrainingConfig

METRICS = "metrics.jsonl"


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Let no other process train into the folder inside the block; a process that is killed lets go of it.

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
    """Raise ConfigError for a folder that holds another run, or this one without `resume`."""
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
        reports = read_metrics(config.run.folder, step)
        put_in_place(path, "".join(json.dumps(metrics) + "\n" for metrics in reports).encode())
    written = json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
    put_in_place(config.run.folder / "config.json", written.encode())


def release_folder(folder: Path) -> None:
    """Take back `claim_folder` where a run came to nothing, so that a run of another configuration may begin there."""
    for name in ("config.json", METRICS):
        (folder / name).unlink(missing_ok=True)


def read_metrics(folder: Path, step: float = math.inf) -> list[dict[str, Any]]:
    """Read the reports of a run up to `step`; half a line at the end, from a run that was killed, is none.

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
    """Fill a written configuration with the defaults of newer keys; return other values as they are."""
    try:
        return TrainingConfig.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return values


def keep_best(checkpoints: Path, step: int) -> bool:
    """Make the checkpoint of `step` the best one; False if there is none."""
    source, folder, link = (checkpoints / name for name in (f"step-{step:06d}", f"best-{step:06d}", "best"))
    if not folder.is_dir():
        if not source.is_dir():
            return False
        temporary = checkpoints / f".{folder.name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            shutil.copytree(source, temporary, copy_function=_link)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    beside = checkpoints / ".best.new"
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.name)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)  # a copy of the run that followed links
    beside.replace(link)
    for other in checkpoints.glob("best-*"):
        if other != folder:
            shutil.rmtree(other)
    return True


def find_best(checkpoints: Path, step: int) -> Path:
    """Find the best checkpoint, which is that of `step`.

    Raises: ConfigError where it is not there any more.
    """
    folder = checkpoints / f"best-{step:06d}"
    if not folder.is_dir():
        raise ConfigError(f"the checkpoint of the best validation, {folder}, is gone; resume with run.export = last")
    return folder


def _link(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


@contextlib.contextmanager
def writing(what: str, run_folder: Path) -> Iterator[None]:
    """Turn errors while `what` is written into the folder of a run into a StorageError.

    Raises: StorageError for an error of the file system, with the checkpoint from which the run can go on.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors puts the system's words into its own.
        reason = getattr(error, "strerror", None) or re.sub(r"^.*I/O error: (.*) \(os error \d+\)$", r"\1", str(error))
        newest = latest_checkpoint(run_folder / "checkpoints")
        sound = "there is no checkpoint yet" if newest is None else f"{newest} is sound"
        way = "go on with --resume" if (run_folder / "config.json").exists() else "start again"
        raise StorageError(f"{what} could not be written: {reason}; {sound}: make room and {way}") from error

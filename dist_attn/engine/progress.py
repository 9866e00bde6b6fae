"""Progress on a terminal: a bar on stderr; where nobody is looking, plain lines or nothing."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["TrainingProgress", "byte_progress", "training_progress"]


@contextlib.contextmanager
def byte_progress(title: str, total: int, *, wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """A function that takes the bytes done so far; it draws only if `wanted` and stderr is a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


@dataclass(frozen=True)
class TrainingProgress:
    """What a run tells while it works."""

    report: Callable[[dict[str, Any]], None]
    """Takes the run's metrics."""

    reading: Callable[[str, int, int], None]
    """Takes what is made ready before the first step, the bytes of it that are done, and all of them."""


@contextlib.contextmanager
def training_progress(steps: int, *, wanted: bool = True) -> Iterator[TrainingProgress]:
    """Bars if stderr is a terminal; else one line on stdout for each report, and nothing while text is read.

    Nothing at all unless it is `wanted`.
    """
    if not wanted:
        yield TrainingProgress(lambda _: None, lambda *_: None)
        return
    if not sys.stderr.isatty():
        yield TrainingProgress(lambda values: print(_line(values), flush=True), lambda *_: None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress:
        run: TaskID | None = None
        texts: dict[str, TaskID] = {}

        def show(values: dict[str, Any]) -> None:
            nonlocal run
            # The time left counts from the first report: a resumed run did not do its earlier steps just now.
            move = progress.reset if run is None else progress.update
            run = progress.add_task("training", total=steps, said="") if run is None else run
            move(run, completed=values["step"])
            if "loss" in values:
                name = next(name for name in values if name.endswith("_per_second"))
                speed = f"{values[name]:,.0f} {name.removesuffix('_per_second')}/s"
                progress.update(run, said=f"{values['step']}/{steps} steps  loss {values['loss']:.4f}  {speed}")
            else:
                progress.console.print(_line(values), markup=False, highlight=False)

        def read(what: str, done: int, total: int) -> None:
            if what not in texts:
                texts[what] = progress.add_task(what, total=total, said="")
            said = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            progress.update(texts[what], completed=done, total=total, said=said)

        yield TrainingProgress(show, read)


def _line(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )

"""Progress on a terminal: a bar on stderr; where nobody is looking, plain lines or nothing."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

__all__ = ["byte_progress", "training_progress"]


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


@contextlib.contextmanager
def training_progress(steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that takes a run's metrics: a bar if stderr is a terminal, else one line on stdout for each report."""
    if not sys.stderr.isatty():
        yield lambda values: print(_line(values), flush=True)
        return
    rate = TextColumn("{task.completed}/{task.total} steps  loss {task.fields[loss]}  {task.fields[speed]} tokens/s")
    columns = (TextColumn("training"), BarColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress:
        task = progress.add_task("training", total=steps, loss="-", speed="-")
        begun = False

        def show(values: dict[str, Any]) -> None:
            nonlocal begun
            # The time left counts from the first report: a resumed run did not do its earlier steps just now.
            move = progress.update if begun else progress.reset
            move(task, completed=values["step"])
            begun = True
            if "loss" in values:
                progress.update(task, loss=f"{values['loss']:.4f}", speed=f"{values['tokens_per_second']:,.0f}")
            else:
                progress.console.print(_line(values), markup=False, highlight=False)

        yield show


def _line(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )

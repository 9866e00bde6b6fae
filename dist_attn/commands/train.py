"""`dist-attn train`: training over the ranks that a launcher started, with progress on a terminal."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from dist_attn.comm import open_communicator
from dist_attn.devices import choose_device
from dist_attn.launchers import stop_on_signals
from dist_attn.training import train
from dist_attn.training.config import TrainingConfig


def train_here(settings: TrainingConfig, *, resume: bool) -> tuple[str, int]:
    """Train; returns "" and 0, or where a signal ended it before the last step, what is to be said and the exit code.

    Raises: as `train`.
    """
    with (
        open_communicator(timeout_s=settings.run.wait_seconds, device=choose_device(settings.run.device)) as comm,
        training_progress(settings.run.steps, enabled=comm.rank == 0) as shown,
        stop_on_signals() as stop,
    ):
        last = train(
            settings,
            resume=resume,
            report=shown.report,
            progress=shown.reading,
            tell=shown.tell,
            stop=stop,
            comm=comm,
        )
    if not last.get("stopped"):
        return "", 0
    name = "a signal on another rank" if stop.signal is None else stop.signal.name
    said = f"stopped by {name} after step {last['step']} of {settings.run.steps}, which is saved: go on with --resume"
    return said, 128 + (stop.signal or signal.SIGTERM)


class TrainingProgress:
    """The progress of a run as a person sees it; this one shows nothing."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Take one report of the run: a loss, or a validation."""

    def reading(self, what: str, done: int, total: int) -> None:
        """Take how many of `total` bytes of `what` are ready; they are read before the first step."""

    def tell(self, line: str) -> None:
        """Say something that is no number."""


@contextlib.contextmanager
def training_progress(steps: int, *, enabled: bool = True) -> Iterator[TrainingProgress]:
    """Bars if stderr is a terminal; else one line on stdout for each report, and nothing while text is read.

    Nothing at all unless it is `enabled`.
    """
    if not enabled:
        yield TrainingProgress()
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[summary]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600, expand=True) as progress:
            yield _Bar(progress, steps)


@final
class _Lines(TrainingProgress):
    def report(self, metrics: dict[str, Any]) -> None:
        print(_line(metrics), flush=True)

    def tell(self, line: str) -> None:
        print(line, flush=True)


@final
class _Bar(TrainingProgress):
    """Step k of n, loss, speed, the last validation, the time left; each validation also stays as a line above."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress, self._steps = progress, steps
        self._run: TaskID | None = None
        self._texts: dict[str, TaskID] = {}
        self._training = self._validation = ""

    def report(self, metrics: dict[str, Any]) -> None:
        # The time left counts from the first report: a resumed run did not do its earlier steps just now.
        move = self._progress.reset if self._run is None else self._progress.update
        if self._run is None:
            self._run = self._progress.add_task("training", total=self._steps, summary="")
        move(self._run, completed=metrics["step"])
        speeds = [name for name in metrics if name.endswith("_per_second")]
        if "loss" in metrics:
            parts = [f"loss {metrics['loss']:.4f}"]
            parts += [f"{metrics[name]:,.0f} {name.removesuffix('_per_second')}/s" for name in speeds]
            self._training = "  ".join(parts)
        else:
            scores = {name: value for name, value in metrics.items() if isinstance(value, float)}
            self._validation = _line(scores)
            self.tell(_line(metrics))
        summary = "  ".join(filter(None, (self._training, self._validation)))
        self._progress.update(self._run, description=f"step {metrics['step']} of {self._steps}", summary=summary)

    def reading(self, what: str, done: int, total: int) -> None:
        if what not in self._texts:
            self._texts[what] = self._progress.add_task(what, total=total, summary="")
        summary = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        self._progress.update(self._texts[what], completed=done, total=total, summary=summary)

    def tell(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)


def _line(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )

"""What a run reports and where: metrics.jsonl and the caller always, TensorBoard and a picture where it can."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from dist_attn.training.config import RunConfig
from dist_attn.training.loss_plot import LossPlot
from dist_attn.training.run_folder import METRICS
from dist_attn.training.run_log import CallbackSink, JsonLines, Metrics, RunLog, Sink
from dist_attn.training.task import Task
from dist_attn.training.tensorboard import TensorBoard

__all__ = ["Spare", "Tell", "open_log"]

Tell = Callable[[str], None]
"""Is given what a person should know, in one line."""


def open_log(run: RunConfig, task: Task, step: int, report: Callable[[Metrics], None], tell: Tell) -> RunLog:
    """Everything that takes the metrics of a run which goes on after `step`."""
    folder = run.folder
    sinks: list[Sink] = [JsonLines(folder / METRICS), CallbackSink(report)]
    if run.tensorboard:
        sinks.append(
            Spare("events for TensorBoard", lambda: TensorBoard(folder / "tensorboard", step, task.unit), tell)
        )
    if run.plot:
        sinks.append(Spare("loss.png", lambda: _plot(folder, task), tell))
    return RunLog(sinks)


def _plot(folder: Path, task: Task) -> Sink:
    return LossPlot(folder, task.unit, task.loss_unit, task.criterion)


@final
class Spare:
    """A sink that no run ends for: what goes wrong with it is told once, and then it is left alone."""

    def __init__(self, name: str, make: Callable[[], Sink], tell: Tell) -> None:
        self._name, self._tell = name, tell
        self._sink: Sink | None = None
        with self._spared():
            self._sink = make()

    def write(self, metrics: Metrics) -> None:
        """Pass it on."""
        if self._sink is not None:
            with self._spared():
                self._sink.write(metrics)

    def close(self) -> None:
        """Close it."""
        if self._sink is not None:
            with self._spared():
                self._sink.close()

    @contextlib.contextmanager
    def _spared(self) -> Iterator[None]:
        try:
            yield
        # Whatever a library for pictures or events raises, hours of training are worth more.
        except Exception as error:
            self._sink = None
            self._tell(f"no {self._name}: {error}")

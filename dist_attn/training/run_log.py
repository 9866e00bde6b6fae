"""The reports of a run and their sinks: metrics.jsonl and the caller always, TensorBoard and a picture where it can."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, Self, final

from dist_attn.errors import MissingExtraError, extra_hint
from dist_attn.training.config import RunConfig
from dist_attn.training.run_folder import METRICS, read_metrics
from dist_attn.training.task import Criterion, Task

Metrics = dict[str, Any]
"""One report: `step`, and what was measured then (`loss`, `learning_rate`, `bits_per_byte`, …)."""


class Sink(Protocol):
    """Something that keeps or shows metrics."""

    def write(self, metrics: Metrics) -> None:
        """Take one report."""
        ...

    def close(self) -> None:
        """End with the run, in whatever way it ends."""
        ...


@final
class JsonLines:
    """The file metrics.jsonl: one object per line, on disk as soon as it is known."""

    def __init__(self, path: Path) -> None:
        # Nothing waits in a buffer: what a full disk refuses is not tried again at the end.
        self._file = path.open("ab", buffering=0)

    def write(self, metrics: Metrics) -> None:
        """Append one line."""
        line = json.dumps(metrics).encode() + b"\n"
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class RunLog:
    """All sinks of a run as one, and a function that is told as they are; a context that closes the sinks.

    Only the rank that writes files has any.
    """

    def __init__(self, sinks: Sequence[Sink], report: Callable[[Metrics], None] = lambda _: None) -> None:
        self._sinks, self._report = tuple(sinks), report
        self._closing = ExitStack()

    def write(self, metrics: Metrics) -> None:
        """Give one report to every sink."""
        for sink in self._sinks:
            sink.write(metrics)
        self._report(metrics)

    def __enter__(self) -> Self:
        for sink in self._sinks:
            self._closing.callback(sink.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


@final
class TensorBoard:
    """An event file in `folder`; of a run that goes on after `step`, earlier files' reports of later steps are void.

    Raises: MissingExtraError without tensorboard.
    """

    def __init__(self, folder: Path, step: int, unit: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError(
                f"they need tensorboard: {extra_hint('tensorboard')}, or set run.tensorboard = false"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        self._skipped = {"step", "steps", unit}

    def write(self, metrics: Metrics) -> None:
        """Add every number of one report."""
        training = "loss" in metrics
        for name, value in metrics.items():
            if name in self._skipped or not isinstance(value, Real):
                continue
            group = "speed" if name.endswith("_per_second") else "training" if training else "validation"
            self._writer.add_scalar(f"{group}/{name}", float(value), metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


Point = tuple[float, float]
SMOOTHED_FROM = 40  # points of the training loss; fewer are drawn as they are
SHARE_SMOOTHED = 0.06


@final
class LossPlot:
    """The picture loss.png in the run folder, drawn from its metrics at every validation and at the end.

    Raises: MissingExtraError without matplotlib.
    """

    def __init__(self, run_folder: Path, unit: str, loss_unit: str, criterion: Criterion | None) -> None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise MissingExtraError(f"it needs matplotlib: {extra_hint('plot')}, or set run.plot = false") from None
        self._folder, self._unit, self._loss_unit, self._criterion = run_folder, unit, loss_unit, criterion

    def write(self, metrics: Metrics) -> None:
        """Draw again at a validation."""
        if "loss" not in metrics:
            self._draw()

    def close(self) -> None:
        """Draw the end of the run."""
        self._draw()

    def _draw(self) -> None:
        reports = read_metrics(self._folder)
        if any("loss" in report for report in reports):
            beside = self._folder / ".loss.new.png"
            draw(reports, beside, self._unit, self._loss_unit, self._criterion)
            beside.replace(self._folder / "loss.png")


def draw(
    reports: Sequence[Metrics], out: Path, unit: str = "tokens", loss_unit: str = "", criterion: Criterion | None = None
) -> None:
    """Draw the reports of a run: training loss, the validation metric that decides, learning rate.

    Needs matplotlib, and at least one report with a loss.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    losses, rates = (_points(reports, name, unit) for name in ("loss", "learning_rate"))
    scores = _points(reports, criterion.metric, unit) if criterion else []
    heights = [3.0, *([2.2] if scores else []), 1.1]
    # A figure of its own, not pyplot's: nothing global, no window, any thread.
    figure = Figure(figsize=(8.0, 1.4 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _draw_losses(panels[0], losses, loss_unit)
    if criterion is not None and scores:
        _draw_scores(panels[1], scores, criterion)
    panels[-1].plot(*zip(*rates, strict=True), color="tab:gray")
    panels[-1].set_ylabel("learning rate")
    panels[-1].set_ylim(bottom=0)
    panels[-1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    panels[-1].yaxis.set_major_locator(MaxNLocator(4))
    panels[-1].set_xlabel(f"{unit} read in training")
    panels[-1].xaxis.set_major_formatter(EngFormatter())
    for panel in panels:
        panel.grid(True, alpha=0.3)
        panel.margins(x=0.02)
    last = max(int(report["step"]) for report in reports)
    figure.suptitle(f"after {last:,} steps, {max(x for x, _ in losses):,.0f} {unit}", fontsize=10)
    figure.savefig(out, dpi=110)


def _points(reports: Sequence[Metrics], name: str, unit: str) -> list[Point]:
    """The points (what was read, value) of the reports that have the value as a number that can be drawn."""
    points = [(float(report[unit]), float(report[name])) for report in reports if name in report and unit in report]
    return [(x, y) for x, y in points if math.isfinite(y)]


def _draw_losses(panel: Any, losses: Sequence[Point], loss_unit: str) -> None:
    smooth = len(losses) >= SMOOTHED_FROM
    label = "mean since the report before"
    panel.plot(*_columns(losses), color="tab:blue", alpha=0.3 if smooth else 1.0, label=label)
    if smooth:
        panel.plot(*_columns(_smoothed(losses)), color="tab:blue", label="smoothed")
        panel.legend(loc="upper right")
    panel.set_ylabel(f"training loss ({loss_unit})" if loss_unit else "training loss")


def _draw_scores(panel: Any, scores: Sequence[Point], criterion: Criterion) -> None:
    best = (min if criterion.better == "lower" else max)(scores, key=lambda point: point[1])
    panel.plot(*_columns(scores), color="tab:orange", marker="o", markersize=3)
    panel.plot(*best, color="tab:red", marker="*", markersize=11, linestyle="", label=f"best: {best[1]:.4g}")
    panel.legend(loc="upper right" if criterion.better == "lower" else "lower right")
    panel.set_ylabel(f"validation:\n{criterion.metric.replace('_', ' ')}")


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Smooth by the mean of as many points before as behind, so that nothing lags; fewer towards both ends."""
    reach = max(1, round(SHARE_SMOOTHED * len(points) / 2))
    smooth = []
    for at, (x, _) in enumerate(points):
        near = min(reach, at, len(points) - 1 - at)
        around = [y for _, y in points[at - near : at + near + 1]]
        smooth.append((x, sum(around) / len(around)))
    return smooth


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


Tell = Callable[[str], None]
"""A function that is given one line that a person should know."""


def open_log(run: RunConfig, task: Task, step: int, report: Callable[[Metrics], None], tell: Tell) -> RunLog:
    """Open all sinks of the metrics of a run that goes on after `step`."""
    folder = run.folder
    sinks: list[Sink] = [JsonLines(folder / METRICS)]
    if run.tensorboard:
        sinks.append(
            Spare("events for TensorBoard", lambda: TensorBoard(folder / "tensorboard", step, task.unit), tell)
        )
    if run.plot:
        sinks.append(Spare("loss.png", lambda: LossPlot(folder, task.unit, task.loss_unit, task.criterion), tell))
    return RunLog(sinks, report)


@final
class Spare:
    """A sink whose errors do not end the run: the first is told, and the sink is not used again."""

    def __init__(self, name: str, make: Callable[[], Sink], tell: Tell) -> None:
        self._name, self._tell = name, tell
        self._sink: Sink | None = None
        with self._spared():
            self._sink = make()

    def write(self, metrics: Metrics) -> None:
        """Pass the report on."""
        if self._sink is not None:
            with self._spared():
                self._sink.write(metrics)

    def close(self) -> None:
        """Close the sink."""
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

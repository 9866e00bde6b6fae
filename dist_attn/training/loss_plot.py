"""The picture of a run: losses and learning rate against what it has read."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from dist_attn.errors import MissingExtraError, extra_hint
from dist_attn.training.run_folder import read_metrics
from dist_attn.training.run_log import Metrics
from dist_attn.training.task import Criterion

__all__ = ["LossPlot", "draw"]

Point = tuple[float, float]
SMOOTHED_FROM = 40  # points of the training loss; fewer are drawn as they are
SHARE_SMOOTHED = 0.06


@final
class LossPlot:
    """loss.png in the run folder, drawn from its metrics at every validation and at the end.

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
    """A picture of the reports of a run: training loss, the validation metric that decides, learning rate.

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
    """(what was read, value) of each report that has the value as a number that can be drawn."""
    found = [(float(report[unit]), float(report[name])) for report in reports if name in report and unit in report]
    return [(x, y) for x, y in found if math.isfinite(y)]


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
    """The mean of as many points before as behind, so that nothing lags; fewer towards both ends."""
    reach = max(1, round(SHARE_SMOOTHED * len(points) / 2))
    smooth = []
    for at, (x, _) in enumerate(points):
        near = min(reach, at, len(points) - 1 - at)
        around = [y for _, y in points[at - near : at + near + 1]]
        smooth.append((x, sum(around) / len(around)))
    return smooth


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]

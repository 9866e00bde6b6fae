"""Which validation of a run was the best, and for how many there has been none better: read off its metrics."""

import math
from collections.abc import Iterable
from typing import final

from dist_attn.errors import ConfigError
from dist_attn.training.config import RunConfig
from dist_attn.training.run_log import Metrics
from dist_attn.training.task import Criterion

__all__ = ["Standing"]


@final
class Standing:
    """The best validation so far by a task's criterion, and when a run that gets no better ends.

    It depends on the metrics alone, in their order, so a resumed run that reads its own metrics.jsonl stands where the
    undisturbed one stood.
    """

    def __init__(self, criterion: Criterion | None, run: RunConfig) -> None:
        wanted = [
            f"run.{key}" for key, given in (("patience", run.patience), ("export", run.export == "best")) if given
        ]
        if wanted and criterion is None:
            raise ConfigError(f"{wanted[0]} asks for the best validation; this run has none: give data.validation")
        self._criterion, self._patience, self._min_delta = criterion, run.patience, run.min_delta
        self._reference = math.inf
        self.best: Metrics | None = None
        self.waited = 0

    def see(self, metrics: Metrics) -> bool:
        """Take one report; whether it is a validation, and the best so far."""
        if self._criterion is None or self._criterion.metric not in metrics:
            return False
        value = self._cost(metrics)
        # The wait is for progress worth waiting for; what is kept is the best, by however little.
        if value < self._reference - self._min_delta:
            self._reference, self.waited = value, 0
        else:
            self.waited += 1
        if math.isnan(value) or (self.best is not None and value >= self._cost(self.best)):
            return False
        self.best = dict(metrics)
        return True

    def see_all(self, reports: Iterable[Metrics]) -> None:
        """Take the reports of a run that goes on."""
        for metrics in reports:
            self.see(metrics)

    @property
    def is_over(self) -> bool:
        """Whether `run.patience` validations in a row were no progress."""
        return self._patience is not None and self.waited >= self._patience

    def _cost(self, metrics: Metrics) -> float:
        """What the criterion makes of a report: lower is better."""
        assert self._criterion is not None
        value = float(metrics[self._criterion.metric])
        return value if self._criterion.better == "lower" else -value

"""When a run ends before its last step: no validation gets better, or a signal asks it to stop."""

import contextlib
import math
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import final

from dist_attn.errors import ConfigError
from dist_attn.training.config import RunConfig
from dist_attn.training.run_log import Metrics
from dist_attn.training.task import Criterion


@final
class Standing:
    """The best validation so far by a task's criterion, and when a run that gets no better ends.

    It depends on the metrics alone, in their order, so a resumed run that reads its own metrics.jsonl stands where the
    undisturbed one stood.
    """

    def __init__(self, criterion: Criterion | None, run: RunConfig) -> None:
        asking = [
            f"run.{key}" for key, is_set in (("patience", run.patience), ("export", run.export == "best")) if is_set
        ]
        if asking and criterion is None:
            raise ConfigError(f"{asking[0]} asks for the best validation; this run has none: give data.validation")
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


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Whether to stop after this step."""
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM is a request to stop; a second one does what it did outside.

    Only the main thread may enter.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()

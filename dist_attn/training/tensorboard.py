"""The metrics of a run as events for TensorBoard."""

from numbers import Real
from pathlib import Path
from typing import final

from dist_attn.errors import MissingExtraError, extra_hint
from dist_attn.training.run_log import Metrics

__all__ = ["TensorBoard"]


@final
class TensorBoard:
    """An event file in `folder`; of a run that goes on after `step`, what earlier files say of later steps is void.

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

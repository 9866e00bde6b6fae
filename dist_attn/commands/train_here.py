"""`dist-attn train` in this process, or over the ranks that a launcher started: ranks, progress, and orders to stop."""

import signal

from dist_attn.comm import open_communicator
from dist_attn.commands.progress import training_progress
from dist_attn.training import train
from dist_attn.training.config import TrainingConfig
from dist_attn.training.stopping import stop_on_signals

__all__ = ["train_here"]


def train_here(settings: TrainingConfig, *, resume: bool) -> tuple[str, int]:
    """Train; what is to be said where a signal ended it before the last step, and the exit code: "" and 0 otherwise.

    Raises: as `train`.
    """
    with (
        open_communicator(timeout_s=settings.run.wait_seconds) as comm,
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

"""A job that trains a model as a training file would, resumes where it was stopped, and measures the model folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.nn import Module

from dist_attn.training.config import TrainingConfig
from dist_attn.training.loop import train
from dist_attn.training.run_log import Metrics
from dist_attn_papers.tables.experiment import Interrupted, Job, Scores, Watch

__all__ = ["RUN", "Measure", "count_parameters", "model_folder", "share_tokens", "training_job", "with_warmup"]

RUN = "run"

Measure = Callable[[Path, Metrics, Watch], Scores]
"""From the model folder and the last validation's metrics to the numbers of the job."""


def model_folder(experiment: Path, key: str) -> Path:
    """Where the job of that key has left its model."""
    return experiment / key / RUN / "model"


def count_parameters(model: Module) -> int:
    """The numbers that training changes: random features are not among them."""
    return sum(parameter.numel() for parameter in model.parameters())


def with_warmup(optimiser: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The section [optimiser] of a run of so many steps: its rates rise over the first tenth."""
    return {**optimiser, "warmup_steps": max(1, steps // 10)}


def share_tokens(made: Path, folder: Path) -> None:
    """Let the run keep its tokens where all runs below `made` keep them; their names say of what they are."""
    cache, link = made / "tokens", folder / RUN / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(cache.resolve(), target_is_directory=True)


def training_job(
    arm: str, seed: int, sections: Mapping[str, Any], measure: Measure, needs: tuple[str, ...] = ()
) -> Job:
    """A job over the sections of a training file; `run.folder` and `run.seed` are set here.

    `sections` are values of TOML (paths as strings), see `TrainingConfig`. Units and names of `measure` are its own.
    """
    run = {"tensorboard": False, "plot": False, "seed": seed, **sections["run"]}
    settings = {**sections, "run": run}

    def work(folder: Path, watch: Watch) -> Scores:
        config = TrainingConfig.model_validate({**settings, "run": {**run, "folder": str(folder / RUN)}})
        last: Metrics = {}

        def report(metrics: Metrics) -> None:
            if "loss" in metrics:
                speed = next((f", {value:.0f} {name}" for name, value in metrics.items() if "per_second" in name), "")
                watch.tell(f"step {metrics['step']} of {metrics['steps']}: loss {metrics['loss']:.4f}{speed}")
            else:
                last.clear()
                last.update(metrics)
                watch.tell("validation: " + ", ".join(f"{name} {value}" for name, value in metrics.items()))

        final = train(config, resume=(folder / RUN / "config.json").exists(), report=report, stop=watch.stop)
        if final.get("stopped"):
            raise Interrupted
        return measure(folder / RUN / "model", last or final, watch)

    return Job(arm, seed, settings, work, needs)

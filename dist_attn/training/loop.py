"""The training loop: it steps, logs, validates and saves; what it trains is a `Task`, resumable at every checkpoint."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from dist_attn.models.recomputation import recompute_layers
from dist_attn.training.build_task import build_task
from dist_attn.training.checkpointing import latest_checkpoint, restore, save
from dist_attn.training.config import TrainingConfig
from dist_attn.training.finite import check_finite
from dist_attn.training.optim import build_optimisers, schedule
from dist_attn.training.run_folder import check_folder, claim_folder
from dist_attn.training.run_log import CallbackSink, JsonLines, Metrics, RunLog
from dist_attn.training.task import Share, Whole

__all__ = ["train"]

Report = Callable[[Metrics], None]


def train(config: TrainingConfig, *, resume: bool = False, report: Report = lambda _: None) -> Metrics:
    """Train as `config` says; returns the last metrics. The run folder holds config.json, metrics.jsonl,
    checkpoints/ and, at the end, model/ (a model folder for `load_model`).

    Raises: ConfigError for a folder in use or a resume that does not fit; EngineError when the loss is not finite.
    """
    run = _Run(config, resume)
    return run.to_the_end(report)


class _Run:
    def __init__(self, config: TrainingConfig, resume: bool) -> None:
        self.config = config
        torch.set_num_threads(config.run.threads)
        torch.manual_seed(config.run.seed)
        self.folder = config.run.folder
        check_folder(config, resume)
        self.share: Share = Whole()
        self.task = build_task(config, self.share)
        self.model = self.task.model
        recompute_layers(self.model, config.run.activation_checkpointing)
        self.optimisers = build_optimisers(self.model, config.optimiser)
        self.step = 0
        # Only now that everything fits: a start that failed leaves the folder free.
        newest = latest_checkpoint(self.folder / "checkpoints")
        if resume and newest is not None:
            self.step, carried = restore(newest, self.model, self.optimisers)
            self.task.carry(carried)
        claim_folder(config, self.step)

    def to_the_end(self, report: Report) -> Metrics:
        run, unit = self.config.run, self.task.unit
        last: Metrics = {"step": self.step}
        started, begun, losses = time.perf_counter(), self.step, []
        with RunLog([JsonLines(self.folder / "metrics.jsonl"), CallbackSink(report)]) as log:
            while self.step < run.steps:
                losses.append(self._train_step())
                self.step += 1
                if self._due(run.log_every):
                    elapsed = time.perf_counter() - started
                    seen = self.task.seen(self.step)
                    last = {
                        "step": self.step,
                        "steps": run.steps,
                        "loss": float(np.mean(losses)),
                        "learning_rate": self.optimisers[0].param_groups[0]["lr"],
                        unit: seen,
                        f"{unit}_per_second": round((seen - self.task.seen(begun)) / elapsed, 1),
                    }
                    started, begun, losses = time.perf_counter(), self.step, []
                    log.write(last)
                if self._due(run.evaluate_every) and (scores := self._validate()):
                    last = {"step": self.step, **scores}
                    log.write(last)
                if self._due(run.checkpoint_every):
                    self._save()
        self._export(last)
        return last

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.run.steps

    def _train_step(self) -> float:
        factor = schedule(self.step, self.config.run.steps, self.config.optimiser)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["peak_lr"] * factor
        self.task.prepare(self.step)
        loss = self.task.loss(self.step, self.share.rows(self.task.batch))
        value = loss.item()
        check_finite("loss", value, self.step, self.model)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimiser.clip_norm)
        check_finite("norm of the gradients", norm.item(), self.step, self.model)
        for optimiser in self.optimisers:
            optimiser.step()
        return value

    def _validate(self) -> dict[str, float | int]:
        self.model.eval()
        with torch.no_grad():
            scores = self.task.validate()
        self.model.train()
        return scores

    def _save(self) -> None:
        checkpoints, keep = self.folder / "checkpoints", self.config.run.keep_checkpoints
        save(checkpoints, self.step, self.model, self.optimisers, self.task.carried(), keep)

    def _export(self, last: Metrics) -> None:
        facts: dict[str, Any] = {
            f"{self.task.unit}_seen": self.task.seen(self.step),
            "steps": self.step,
            # Where the run lived on its machine is nobody else's business.
            "training": self.config.model_dump(
                mode="json", include={"optimiser", "run"}, exclude={"run": {"folder", "begin_from"}}
            ),
            "last": last,
        }
        self.task.export(self.folder / "model", self.model.state_dict(), facts)

"""The training loop: it steps, logs, validates and saves; what it trains is a `Task`, resumable at every checkpoint."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.devices import choose_compute
from dist_attn.errors import CommError, ConfigError, InputError
from dist_attn.model_config.registry import load_build
from dist_attn.models.blocks import recompute_layers
from dist_attn.models.dropout import use_dropout
from dist_attn.ops import Watch, watching
from dist_attn.ops.processor import denormals_flushed
from dist_attn.training.checkpointing import latest_checkpoint, read_weights, restore, save
from dist_attn.training.config import EXECUTION, RunConfig, TrainingConfig
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.finite import check_finite
from dist_attn.training.kinds import TASKS
from dist_attn.training.mesh import Mesh, Share
from dist_attn.training.optim import build_optimisers, schedule
from dist_attn.training.parallel import place
from dist_attn.training.run_folder import (
    METRICS,
    check_folder,
    claim_folder,
    find_best,
    hold_folder,
    keep_best,
    read_metrics,
    release_folder,
    writing,
)
from dist_attn.training.run_log import Metrics, RunLog, Tell, open_log
from dist_attn.training.task import Criterion, Task


def build_task(config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> Task:
    """Build the task of `config` for this share of its batches: read the data and make the model.

    `progress` hears of text that is tokenised.

    Raises: ConfigError for data that is missing or does not fit the model.
    """
    task: Task = load_build(TASKS.find(config.model.kind).build)(config, share, progress)
    return task


Report = Callable[[Metrics], None]


def train(
    config: TrainingConfig,
    *,
    resume: bool = False,
    report: Report = lambda _: None,
    tell: Tell = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    comm: Communicator | None = None,
    progress: Progress = nothing_shown,
) -> Metrics:
    """Train as `config` says, over all ranks of `comm`; returns the last metrics. The run folder holds config.json,
    metrics.jsonl, checkpoints/ and, at the end, model/ (a model folder for `load_model`); rank 0 writes it, and tells
    `progress` of text that is tokenised.

    `report` is given the metrics, `tell` lines for people. Once `stop()` is true on any rank, the run saves a
    checkpoint after the step and returns metrics with `stopped`.

    Raises: ConfigError for a folder in use, a device that is not there or a resume that does not fit; EngineError when
        the loss is not finite, or for what went wrong on another rank; StorageError for a full disk; CommError
        when a rank is lost.
    """
    world = LocalCommunicator() if comm is None else comm
    compute = choose_compute(config.run.device, config.run.dtype)
    # The precision that "auto" has become is recorded with the run, which keeps it when it goes on elsewhere.
    config = config.model_copy(update={"run": config.run.model_copy(update={"dtype": compute.precision})})
    with Mesh(world, config.run.data_ranks, config.run.sequence_ranks, compute.device) as mesh, ExitStack() as held:
        held.enter_context(denormals_flushed())
        run = _Run(config, resume, mesh, progress, held)
        if mesh.is_first:
            tell(compute.sentence(world))
        try:
            return run.to_the_end(report, tell, stop)
        except (InputError, OSError) as error:
            if mesh.is_first:
                if isinstance(error, InputError) and latest_checkpoint(run.folder / "checkpoints") is None:
                    release_folder(run.folder)
                raise
            # Only the first rank speaks of what all of them meet alike; this one met something by itself.
            raise CommError(f"rank {world.rank} of {world.size} failed: {error}") from error


@final
class Standing:
    """The best validation so far by a task's criterion, and the end of a run that gets no better.

    It depends on the metrics alone, in their order, so a resumed run that reads its own metrics.jsonl goes on as an
    uninterrupted one would.
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
        """Take one report; True if it is a validation and the best so far."""
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
        """Return whether `run.patience` validations in a row were no progress."""
        return self._patience is not None and self.waited >= self._patience

    def _cost(self, metrics: Metrics) -> float:
        """The value that the criterion makes of a report: lower is better."""
        assert self._criterion is not None
        value = float(metrics[self._criterion.metric])
        return value if self._criterion.better == "lower" else -value


class _Run:
    def __init__(self, config: TrainingConfig, resume: bool, mesh: Mesh, progress: Progress, held: ExitStack) -> None:
        self.config, self.mesh = config, mesh
        self._held = held  # what is let go of when the run ends
        self.progress = progress if mesh.is_first else nothing_shown
        torch.set_num_threads(config.run.threads)
        self.folder = config.run.folder
        self.share = mesh.share()
        self.task = self._first_on_rank_0(lambda: self._prepare(resume))
        self.model = self.task.model
        recompute_layers(self.model, config.run.activation_checkpointing)
        self.dropout = use_dropout(self.model, config.objective.dropout, config.run.seed)
        self.micro_batches = mesh.together(lambda: mesh.micro_batches(self.task.batch, config.data.micro_batches))
        self.parameters = place(self.model, mesh, sharded=config.run.shard_parameters)
        self.optimisers = build_optimisers(self.model, config.optimiser, by_name=self.task.matrices_by_name)
        self.standing = Standing(self.task.criterion, config.run)
        self.step = 0
        # Only now that everything fits: a start that failed leaves the folder free.
        newest = latest_checkpoint(self.folder / "checkpoints")
        if resume and newest is not None:
            self.step, carried = mesh.together(lambda: restore(newest, self.model, self.optimisers))
            rows = self.share.rows(self.task.batch)
            mesh.together(lambda: self.task.carry({name: tensor[rows] for name, tensor in carried.items()}))
        self.standing.see_all(mesh.together(lambda: read_metrics(self.folder, self.step)) if resume else [])
        mesh.together(lambda: self._claim_folder() if mesh.is_first else None)

    def _prepare(self, resume: bool) -> Task:
        torch.manual_seed(self.config.run.seed)
        if self.mesh.is_first:
            self._held.enter_context(hold_folder(self.folder))
            check_folder(self.config, resume)
        with writing("what the run has made ready of its data", self.folder):
            return build_task(self.config, self.share, self.progress)

    def _claim_folder(self) -> None:
        with writing("config.json", self.folder):
            claim_folder(self.config, self.step)
            if self.standing.best is not None:
                # The run may have been killed between a checkpoint and its second name.
                keep_best(self.folder / "checkpoints", self.standing.best["step"])

    def _first_on_rank_0(self, work: Callable[[], Task]) -> Task:
        """Do the work on rank 0 first: the others find in the folder what it has written (the tokens of the texts)."""
        first = self.mesh.together(lambda: work() if self.mesh.is_first else None)
        others = self.mesh.together(lambda: None if self.mesh.is_first else work())
        return cast(Task, first or others)

    def to_the_end(self, report: Report, tell: Tell, stop: Callable[[], bool]) -> Metrics:
        run, unit = self.config.run, self.task.unit
        last: Metrics = {"step": self.step}
        started, begun, losses = time.perf_counter(), self.step, []
        with self._open_log(report, tell) as log:
            while not self._is_over:
                loss, asked = self._train_step(stop)
                losses.append(loss)
                self.step += 1
                seen = self.task.seen(self.step)
                if self._due(run.log_every):
                    elapsed = time.perf_counter() - started
                    last = {
                        "step": self.step,
                        "steps": run.steps,
                        "loss": float(np.mean(losses)),
                        "learning_rate": self.optimisers[0].param_groups[0]["lr"],
                        unit: seen,
                        f"{unit}_per_second": round((seen - self.task.seen(begun)) / elapsed, 1),
                    }
                    started, begun, losses = time.perf_counter(), self.step, []
                    self._write(log, last)
                best = False
                if self._due(run.evaluate_every) and (scores := self._validate()):
                    asked = asked or bool(self.share.sum(torch.tensor(float(stop()), device="cpu")))
                    last = {"step": self.step, unit: seen, **scores}
                    self._write(log, last)
                    for line in self.task.remarks(self.step, scores) if self.mesh.is_first else ():
                        tell(line)
                    best = self.standing.see(last)
                stopped = asked and not self._is_over
                if self._due(run.checkpoint_every) or best or stopped or self._is_over:
                    self._save(best)
                if stopped:
                    return {**last, "step": self.step, "stopped": True}
        self._export(last)
        return last

    @property
    def _is_over(self) -> bool:
        return self.step >= self.config.run.steps or self.standing.is_over

    def _open_log(self, report: Report, tell: Tell) -> RunLog:
        if not self.mesh.is_first:
            return RunLog([])
        return open_log(self.config.run, self.task, self.step, report, tell)

    def _write(self, log: RunLog, metrics: Metrics) -> None:
        def write() -> None:
            with writing(METRICS, self.folder):
                log.write(metrics)

        self.mesh.together(write)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.run.steps

    def _train_step(self, stop: Callable[[], bool]) -> tuple[float, bool]:
        """Take a step; returns the loss, and whether any rank was asked to stop: a signal may reach only some yet."""
        factor = schedule(self.step, self.config.run.steps, self.config.optimiser)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["peak_lr"] * factor
        before = self.task.carried()
        total = self._forward_and_backward()
        sums_2 = self.share.sum(torch.stack([total, torch.full_like(total, float(stop()))]))
        ranks_with_one_N = self.parameters.reduce_gradients()
        norm = self.parameters.clip_gradients(self.config.optimiser.clip_norm)
        # The one wait of a step for its device.
        read = torch.cat([t.to(sums_2).reshape(-1) for t in (sums_2, norm, ranks_with_one_N)]).tolist()
        self.mesh.world.check_exchanges()
        loss, asked, norm_read, *ranks_with_one = read
        self._check(loss, None, before)
        self._check(loss, norm_read, before)
        self.parameters.drop_missing(ranks_with_one)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss, bool(asked)

    def _forward_and_backward(self, backward: bool = True) -> Tensor:
        """Compute this rank's part of the loss; its gradients are added to those of the parameters."""
        # All that is drawn in a step depends on the seed, the step and the rank: a resumed run draws the same.
        torch.manual_seed(_step_seed(self.config.run.seed, self.step, self.mesh.world.rank))
        self.task.prepare(self.step)
        self.dropout.step = self.step
        total = torch.zeros((), dtype=torch.float64, device=self.share.device)
        for rows in self.micro_batches:
            self.dropout.first_row = rows.start * self.task.sequences_per_row
            loss = self.parameters.with_values(partial(self.task.loss, self.step, rows))
            if backward:
                self.parameters.backward(loss)
            total += loss.detach()
        return total

    def _check(self, loss: float, norm: float | None, before: Mapping[str, Tensor]) -> None:
        """Stop where loss or norm is not finite; the search for the origin runs the step again as it was."""

        def again(backward: bool) -> None:
            self.task.carry(before)
            self._forward_and_backward(backward)

        check_finite(loss, norm, self.step, self.model, again, self.config.run, self.mesh.world)

    def _validate(self) -> dict[str, float | int]:
        self.model.eval()
        watch = Watch()
        with torch.no_grad(), watching(watch):
            scores = self.parameters.with_values(self.task.validate)
        if scores:
            scores = {**scores, **self._guarded(watch)}
        self.mesh.world.check_exchanges()
        self.model.train()
        return scores

    def _guarded(self, watch: Watch) -> dict[str, float]:
        """The share of all ranks' denominators that a guard changed before division; empty without any division."""
        own_2 = torch.tensor([sum(map(sum, watch.guarded)), watch.denominators], dtype=torch.float64, device="cpu")
        guarded, denominators = self.share.sum(own_2.to(self.share.device)).tolist()
        return {"guarded_share": guarded / denominators} if denominators else {}

    def _save(self, best: bool) -> None:
        carried = self.mesh.gather_rows(self.task.carried(), self.task.batch)
        self.mesh.world.check_exchanges()
        checkpoints, keep = self.folder / "checkpoints", self.config.run.keep_checkpoints
        what = f"the checkpoint of step {self.step}"
        with writing(what, self.folder):
            save(checkpoints, self.step, self.model, self.optimisers, carried, keep, self.mesh)

        def mark_best() -> None:
            with writing(what, self.folder):
                keep_best(checkpoints, self.step)

        self.mesh.together(lambda: mark_best() if best and self.mesh.is_first else None)

    def _export(self, last: Metrics) -> None:
        weights = self.parameters.whole_weights()
        self.mesh.together(lambda: self._export_files(last, weights) if self.mesh.is_first else None)

    def _export_files(self, last: Metrics, weights: Mapping[str, Tensor]) -> None:
        step = self.step
        if self.config.run.export == "best" and self.standing.best is not None:
            last = self.standing.best
            step, weights = last["step"], read_weights(find_best(self.folder / "checkpoints", last["step"]))
        facts: dict[str, Any] = {
            f"{self.task.unit}_seen": self.task.seen(step),
            "steps": step,
            # Paths of this machine do not leave it with the model.
            "training": self.config.model_dump(
                mode="json", include={"optimiser", "run"}, exclude={"run": {"folder", "begin_from", *EXECUTION}}
            ),
            "last": last,
        }
        with writing("the model", self.folder):
            self.task.export(self.folder / "model", weights, facts)


def _step_seed(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big")

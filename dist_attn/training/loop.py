"""The training loop: stateful segments, one process, resumable at every checkpoint."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_attn.checkpoints import load_model, save_model
from dist_attn.errors import ConfigError, EngineError
from dist_attn.models import LanguageModel, build_model
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.checkpointing import latest_checkpoint, restore, save
from dist_attn.training.config import TrainingConfig
from dist_attn.training.data import SegmentStream, tokenise_files
from dist_attn.training.evaluation import Score, score_tokens
from dist_attn.training.optim import build_optimisers, schedule

__all__ = ["train"]

# Tokens whose logits exist at the same time.
LOSS_PIECE = 512

Report = Callable[[dict[str, Any]], None]


def train(config: TrainingConfig, *, resume: bool = False, report: Report = lambda _: None) -> dict[str, Any]:
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
        _check_folder(config, resume)
        self.tokeniser: Tokeniser = load_tokeniser(config.data.tokeniser)
        if self.tokeniser.vocab_size != config.model.vocab_size:
            raise ConfigError(
                f"the tokeniser in {config.data.tokeniser} has {self.tokeniser.vocab_size} tokens, "
                f"model.vocab_size is {config.model.vocab_size}; they must be equal"
            )
        tokens = tokenise_files(config.data.train_files, self.tokeniser, self.folder / "cache")
        self.stream = SegmentStream(tokens, config.data.batch, config.data.segment)
        self.validation = _validation_text(config)
        self.model = _first_model(config)
        self.optimisers = build_optimisers(self.model, config.optimiser)
        self.state = self.model.initial_state(config.data.batch)
        self.step = 0
        # Only now that everything fits: a start that failed leaves the folder free.
        newest = latest_checkpoint(self.folder / "checkpoints")
        if resume and newest is not None:
            self.step, self.state = restore(newest, self.model, self.optimisers, self.state)
        _claim_folder(config, self.step)

    def to_the_end(self, report: Report) -> dict[str, Any]:
        run = self.config.run
        tokens_per_step = self.config.data.batch * self.config.data.segment
        last: dict[str, Any] = {"step": self.step}
        started, tokens_since, losses = time.perf_counter(), 0, []
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            while self.step < run.steps:
                losses.append(self._train_step())
                self.step += 1
                tokens_since += tokens_per_step
                if self.step % run.log_every == 0 or self.step == run.steps:
                    elapsed = time.perf_counter() - started
                    last = {
                        "step": self.step,
                        "steps": run.steps,
                        "loss": float(np.mean(losses)),
                        "learning_rate": self.optimisers[0].param_groups[0]["lr"],
                        "tokens": self.step * tokens_per_step,
                        "tokens_per_second": round(tokens_since / elapsed, 1),
                    }
                    started, tokens_since, losses = time.perf_counter(), 0, []
                    _log(metrics, last, report)
                if self.step % run.evaluate_every == 0 or self.step == run.steps:
                    score = self._evaluate()
                    if score is not None:
                        last = {"step": self.step, "bits_per_byte": score.bits_per_byte, "bytes": score.num_bytes}
                        _log(metrics, last, report)
                if self.step % run.checkpoint_every == 0 or self.step == run.steps:
                    checkpoints = self.folder / "checkpoints"
                    save(checkpoints, self.step, self.model, self.optimisers, self.state, run.keep_checkpoints)
        self._export(last)
        return last

    def _train_step(self) -> float:
        inputs_BL, targets_BL = self.stream(self.step)
        factor = schedule(self.step, self.config.run.steps, self.config.optimiser)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["peak_lr"] * factor
        if self.model.redraw(self.step):
            # Sums of other random features mean nothing to these: with a pool, segments stand alone.
            self.state = self.model.initial_state(self.config.data.batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.run.bf16):
            h_BLD, after = self.model.hidden(inputs_BL, state=self.state)
        loss = self._loss(h_BLD.flatten(0, 1), targets_BL.flatten())
        value = loss.item()
        self._check_finite("loss", value)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimiser.clip_norm)
        self._check_finite("norm of the gradients", norm.item())
        for optimiser in self.optimisers:
            optimiser.step()
        if self.config.data.stateful:
            # RFA's stateful training: the state goes on into the next segment, the gradient does not.
            self.state = after.detach()
        return value

    def _loss(self, h_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in pieces that are recomputed backward: whole logits leave the cache: 2 x slower."""

        def piece(h_PD: torch.Tensor, targets_P: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.run.bf16):
                logits_PV = self.model.readout(h_PD)
            return F.cross_entropy(logits_PV.float(), targets_P, reduction="sum")

        pieces = zip(h_ND.split(LOSS_PIECE), targets_N.split(LOSS_PIECE), strict=True)
        losses = [checkpoint(piece, h, targets, use_reentrant=False) for h, targets in pieces]
        return torch.stack(losses).sum() / targets_N.shape[0]

    def _check_finite(self, what: str, value: float) -> None:
        """Stop before a step that would spoil the weights, so that every checkpoint is sound."""
        if not math.isfinite(value):
            raise EngineError(
                f"the {what} is {value} at step {self.step}; {_first_bad(self.model)}. The last checkpoint is sound: "
                "lower optimiser.learning_rate in a new run"
            )

    def _evaluate(self) -> Score | None:
        if self.validation is None:
            return None
        self.model.eval()
        data = self.config.data
        context = None if data.stateful else data.segment
        score = score_tokens(self.model, self.tokeniser.encode(self.validation), len(self.validation), context)
        self.model.train()
        return score

    def _export(self, last: dict[str, Any]) -> None:
        data = self.config.data
        facts = {
            "trained_on": [path.name for path in data.train],
            "tokens_seen": self.step * data.batch * data.segment,
            "steps": self.step,
            # Where the run lived on its machine is nobody else's business.
            "training": self.config.model_dump(
                mode="json", include={"optimiser", "run"}, exclude={"run": {"folder", "begin_from"}}
            ),
            "last": last,
        }
        save_model(self.model, self.folder / "model", tokeniser=self.tokeniser, half=True, facts=facts)


def _check_folder(config: TrainingConfig, resume: bool) -> None:
    """Raises ConfigError for a folder that holds another run, or this one without `resume`."""
    folder, written = config.run.folder, config.model_dump(mode="json")
    path = folder / "config.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = _filled_in(json.loads(path.read_bytes())) if path.exists() else None
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be used: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not the configuration of a run; give another run.folder") from None
    if before is not None and not resume:
        raise ConfigError(f"{folder} holds a run already; give --resume to go on with it, or another run.folder")
    if before is not None:
        differing = [key for key in written if not isinstance(before, dict) or before.get(key) != written[key]]
        if differing:
            raise ConfigError(f"{folder} was started with another [{differing[0]}] section; resume needs the same one")


def _filled_in(values: Any) -> Any:
    """A written configuration with the keys that versions since then have by default; as it is where it is none."""
    try:
        return TrainingConfig.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return values


def _claim_folder(config: TrainingConfig, step: int) -> None:
    """Make the folder this run's own, and forget the metrics of steps after `step`, which are about to come again."""
    path = config.run.folder / "metrics.jsonl"
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        _write_whole(path, "".join(kept))
    written = json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
    _write_whole(config.run.folder / "config.json", written)


def _write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of the file at once: whoever is killed meanwhile leaves the one that was there."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def _first_model(config: TrainingConfig) -> LanguageModel:
    """Fresh, or the one that the run begins from; raises ConfigError where that is not the model of [model]."""
    begin_from = config.run.begin_from
    if begin_from is None:
        return build_model(config.model)
    model = load_model(begin_from)
    if model.config != config.model:
        raise ConfigError(
            f"the model in {begin_from} is not the one of [model]; leave that section out to have the folder's"
        )
    return model.train()


def _validation_text(config: TrainingConfig) -> bytes | None:
    path = config.data.validation_file
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            text = file.read(config.data.validation_bytes)
    except OSError as error:
        raise ConfigError(f"validation text {path} cannot be read: {error.strerror}") from None
    if not text:
        raise ConfigError(f"validation text {path} is empty; give a text, or no data.validation")
    return text


def _first_bad(model: LanguageModel) -> str:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the first parameter that is not finite is {name}"
    return "all parameters are finite"


def _log(metrics: Any, values: dict[str, Any], report: Report) -> None:
    metrics.write(json.dumps(values) + "\n")
    metrics.flush()
    report(values)

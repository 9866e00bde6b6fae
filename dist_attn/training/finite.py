"""A run stops before the step that would spoil its weights, and says where it went wrong and what can be done."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dist_attn.comm import Communicator
from dist_attn.errors import EngineError
from dist_attn.training.checkpointing import latest_checkpoint
from dist_attn.training.config import RunConfig
from dist_attn.training.origin import Finding, Search
from dist_attn.training.parallel import whole

__all__ = ["check_finite"]

Again = Callable[[bool], None]
"""Runs the step once more, as every rank does; with the backward pass where it is true."""


def check_finite(
    loss: float, norm: float | None, step: int, model: nn.Module, again: Again, run: RunConfig, comm: Communicator
) -> None:
    """Let a loss, or a norm of its gradients, pass that training can go on with; all ranks have the same.

    Raises: EngineError otherwise, on every rank alike, with the place where the first number that is not finite
        appears when the step runs again.
    """
    value = loss if norm is None else norm
    if math.isfinite(value):
        return
    what = "loss" if norm is None else "norm of the gradients"
    origin = _first_of_all(_search(model, again, backward=norm is not None), comm)
    calmer = "lower optimiser.learning_rate" + (" or set run.bf16 = false" if run.bf16 else "")
    raise EngineError(
        f"the {what} is {value} at step {step}: {origin}. {_checkpoint(run.folder)}: {calmer} in a new run"
    )


def _search(model: nn.Module, again: Again, *, backward: bool) -> Finding | None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(whole(parameter)).all()):
            return Finding(-1, f"the parameter {name} itself, which the run began with")
    search = Search(model)
    model.zero_grad(set_to_none=True)
    with search.looking(), contextlib.nullcontext() if backward else torch.no_grad():
        again(backward)
    return search.gradient() if backward else search.found


def _first_of_all(found: Finding | None, comm: Communicator) -> str:
    """What the first of all ranks' findings says; a rank that took over another's NaN found it later."""
    said = "" if found is None else f"{found.looked} {found.words}"
    texts = [text.strip() for text in comm.all_gather_text(said, label="not finite")] if comm.size > 1 else [said]
    findings = [(int(text.partition(" ")[0]), rank, text.partition(" ")[2]) for rank, text in enumerate(texts) if text]
    if not findings:
        return (
            "every layer is finite when the step runs again, so it lies behind them: in the loss or in the sum of ranks"
        )
    _, rank, words = min(findings)
    return f"first in {words}" + (f" (rank {rank} of {comm.size})" if comm.size > 1 else "")


def _checkpoint(folder: Path) -> str:
    newest = latest_checkpoint(folder / "checkpoints")
    return "There is no checkpoint yet" if newest is None else f"The last checkpoint, {newest.name}, is sound"

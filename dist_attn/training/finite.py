"""The check that loss and gradients are finite: it stops a run before a bad step, and finds where that went wrong.

A second pass of the step looks at every layer. Nothing is raised while it runs: a rank that left it would leave the
others alone in an exchange.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from dist_attn.comm import Communicator
from dist_attn.errors import EngineError
from dist_attn.ops import FiniteCheck, Watch, watching
from dist_attn.ops.finite import tensors_in
from dist_attn.training.checkpointing import latest_checkpoint
from dist_attn.training.config import RunConfig
from dist_attn.training.parallel import whole


@dataclass(frozen=True)
class Finding:
    """A number that is not finite, told in words, after `looked` looks; all ranks look in the same order."""

    looked: int
    words: str


@dataclass(frozen=True)
class _Gradient:
    """A gradient that came back to the input or the output of a module."""

    module: str
    side: str
    is_finite: bool
    place: int


@final
class Search:
    """A look at what modules of `model` take and give inside `forward()`, and at the gradients that come back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        self._looked = 0
        self._gradients: list[_Gradient] = []
        self.found: Finding | None = None

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the modules while the step runs again."""
        with contextlib.ExitStack() as hooks:
            for name, module in self._model.named_modules():
                before = module.register_forward_pre_hook(partial(self._enter, name))
                after = module.register_forward_hook(partial(self._leave, name))
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            hooks.enter_context(watching(Watch(FiniteCheck(tell=self._operation))))
            yield

    def gradient(self) -> Finding | None:
        """Find the first gradient of the pass that is not finite, and the module whose backward pass made it so."""
        bad = next((n for n, g in enumerate(self._gradients) if not g.is_finite), None)
        if bad is not None:
            first, sound = self._gradients[bad], {g.module for g in self._gradients[:bad] if g.side == "output"}
            # One tensor is the output of a module and the input of the next ones, inner ones among them.
            same = [g.module for g in self._gradients[bad:] if g.place == first.place and g.side == "input"]
            inner = [name for name in same if name in sound]
            if inner:
                return Finding(bad, f"the backward pass of {_named(max(inner, key=len))}")
            around = [name for name in _parents(first.module) if name in sound]
            within = f"the backward pass of {_named(around[0])}" if around else "the gradient of the loss"
            return Finding(bad, f"{within}, where it reaches {_named(first.module)}")
        names = [name for name, p in self._model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
        return Finding(len(self._gradients), f"the gradient of the parameter {names[-1]}") if names else None

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._running.append(name)
        for value in inputs:
            self._look_back(name, "input", value)

    def _leave(self, name: str, module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
        self._running.pop()
        self._looked += 1
        for part, tensor in tensors_in("output", result):
            if not _is_finite(tensor):
                self._find(f"the {part} of {_named(name)}")
        self._look_back(name, "output", result)

    def _operation(self, operation: str, what: str) -> None:
        inside = self._running[-1] if self._running else ""
        self._find(f"{operation} in {_named(inside)}: {what}")

    def _find(self, words: str) -> None:
        if self.found is None:
            self.found = Finding(self._looked, words)

    def _look_back(self, name: str, side: str, value: Any) -> None:
        for _, tensor in tensors_in("", value):
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._came_back, name, side))

    def _came_back(self, name: str, side: str, grad: Tensor | None) -> None:
        if grad is None:  # nothing that counts depends on the tensor
            return
        self._gradients.append(_Gradient(name, side, _is_finite(grad), grad.data_ptr()))


def _is_finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.detach()).all())


def _named(module: str) -> str:
    return module or "the model"


def _parents(name: str) -> list[str]:
    """The names of the modules around this one, the nearest first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)] if name else []


Again = Callable[[bool], None]
"""A function that runs the step once more, on every rank alike; with the backward pass where it is given true."""


def check_finite(
    loss: float, norm: float | None, step: int, model: nn.Module, again: Again, run: RunConfig, comm: Communicator
) -> None:
    """Check that the loss, or where given the norm of its gradients, is finite; all ranks have the same values.

    Raises: EngineError otherwise, on every rank alike, with the place where the first number that is not finite
        appears when the step runs again.
    """
    value = loss if norm is None else norm
    if math.isfinite(value):
        return
    what = "loss" if norm is None else "norm of the gradients"
    origin = _first_of_all(_search(model, again, backward=norm is not None), comm)
    calmer = "lower optimiser.learning_rate" + (" or set run.dtype = float32" if run.dtype != "float32" else "")
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


def _first_of_all(own: Finding | None, comm: Communicator) -> str:
    """Name the first of all ranks' findings; a rank that took over another's NaN found it later."""
    said = "" if own is None else f"{own.looked} {own.words}"
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

"""Where in a step the first number that is not finite appears: a second pass, with an eye on every layer.

Nothing is raised while the pass runs: a rank that left it would leave the others alone in an exchange.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from dist_attn.ops import FiniteCheck, Watch, watching
from dist_attn.ops.finite import tensors_in

__all__ = ["Finding", "Search"]


@dataclass(frozen=True)
class Finding:
    """Something that is not finite, in words, after `looked` looks; all ranks look in the same order."""

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
    """Looks at what modules of `model` take and give inside `forward()`, and at the gradients that come back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        self._looked = 0
        self._gradients: list[_Gradient] = []
        self.found: Finding | None = None

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """While the step runs again."""
        with contextlib.ExitStack() as hooks:
            for name, module in self._model.named_modules():
                before = module.register_forward_pre_hook(partial(self._enter, name))
                after = module.register_forward_hook(partial(self._leave, name))
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            hooks.enter_context(watching(Watch(FiniteCheck(tell=self._operation))))
            yield

    def gradient(self) -> Finding | None:
        """The first gradient of the pass that is not finite, and whose backward pass made it so."""
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

    def _enter(self, name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._running.append(name)
        for value in given:
            self._look_back(name, "input", value)

    def _leave(self, name: str, module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
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
    """The modules around this one, the nearest first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)] if name else []

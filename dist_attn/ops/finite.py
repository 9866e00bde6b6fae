"""The search for the first NaN or infinity: its operation, layer, rank and global token.

Asked for by a `Watch` with a `FiniteCheck`; without one, operations along the sequence are not even wrapped, and a
decode step pays for one look at a context variable. With it, every tensor that goes in or out is read once more.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

from dist_attn.errors import NotFiniteError
from dist_attn.ops.watch import Watch, current_watch

__all__ = ["checked", "checked_if_asked", "checked_step", "tensors_in"]

Given = ParamSpec("Given")
Result = TypeVar("Result")
Ops = TypeVar("Ops")


def checked(ops: Ops) -> Ops:
    """Wrap a `SequenceOps`: while a `FiniteCheck` watches, each operation looks for numbers that are not finite.

    Raises: NotFiniteError from any operation, for its inputs before it runs and for its outputs after, unless the
        check has a `tell`, which is called in place of an error.
    """
    return cast(Ops, _Checked(ops))


def checked_if_asked(ops: Ops, first_token: int = 0) -> Ops:
    """`checked(ops)` while a `FiniteCheck` watches, which hears that tokens begin at `first_token`; else `ops`."""
    watch = current_watch()
    if watch is None or watch.finite is None:
        return ops
    watch.finite.first_tokens = (first_token,)
    return checked(ops)


def checked_step(step: Callable[Given, Result]) -> Callable[Given, Result]:
    """A decode step that raises NotFiniteError in the same way; its tensors have no dimension for tokens."""

    @wraps(step)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        watch = current_watch()
        if watch is None or watch.finite is None:
            return step(*args, **kwargs)
        return cast(Result, _run(watch, step, args, kwargs))

    return run


class _Checked:
    def __init__(self, ops: object) -> None:
        self._ops = ops

    def deferred_states(self) -> AbstractContextManager[None]:
        """Nothing: states are looked at where they come from."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not callable(value):
            return value

        def run(*args: Any, **kwargs: Any) -> Any:
            watch = current_watch()
            if watch is None or watch.finite is None:
                return value(*args, **kwargs)
            return _run(watch, value, args, kwargs)

        return run


def _run(watch: Watch, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    token_dims: list[int | None] = []
    for name, value in given.items():
        for part, tensor in tensors_in(name, value):
            # A parameter's name ends in its shape; L and S stand for tokens.
            shape = name.rpartition("_")[2]
            dims = [dim for dim, letter in enumerate(shape) if letter in "LS" and dim] if part == name else []
            token_dims.append(dims[0] if dims and len(shape) == tensor.dim() and shape[0] == "B" else None)
            _look(watch, function.__name__, f"its input {part}", tensor, token_dims[-1])
    results = function(*args, **kwargs)
    for part, tensor in tensors_in("output", results):
        # The first output is the sequence again, cut as the first input is.
        dim = token_dims[0] if token_dims and part in ("output", "output 0") else None
        _look(watch, function.__name__, f"its {part}", tensor, dim)
    return results


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a value: a tensor, a feature map, a state, or a tuple of such."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from tensors_in(f"{name} {number}", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(f"{name}.{field.name}", getattr(value, field.name))


def _look(watch: Watch, operation: str, what: str, x: torch.Tensor, token_dim: int | None) -> None:
    assert watch.finite is not None  # only called while operations are checked
    x = x.detach()  # looking is no part of the graph, which layers may recompute unwatched
    if not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x).all()):
        return
    bad = ~torch.isfinite(x)
    where = ""
    if token_dim is not None:
        tokens = bad.movedim(token_dim, 0).flatten(1).any(1).nonzero().flatten()
        token = int(tokens[0])
        row = int(bad.select(token_dim, token).flatten(1).any(1).nonzero()[0])
        first = watch.finite.first_token(row)
        where = f" at token {first + token} (row {row} of the batch; {len(tokens)} tokens of this slice have one)"
    elif bad.dim():
        row = int(bad.flatten(1).any(1).nonzero()[0]) if bad.dim() > 1 else int(bad.nonzero()[0])
        where = f" at index {row} of its first dimension"
        if watch.rows is not None:
            where = f" at token {watch.finite.first_token(row)} (row {row} of the batch)"
    value = "NaN" if bool(torch.isnan(x).any()) else "infinite"
    if watch.finite.tell is not None:
        watch.finite.tell(operation, f"{what} is {value}{where}")
        return
    raise NotFiniteError(f"{operation} in layer {watch.layer} on rank {watch.finite.rank}: {what} is {value}{where}")

"""Constant folding for captured steps: what a step makes of weights alone is made once, before the capture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

__all__ = ["ConstantFolding"]


@final
class ConstantFolding(TorchDispatchMode):
    """A mode in which operations on weights alone run once: casts to bfloat16 by autocast, or the turning of taps.

    Autocast's own cache of casts is empty in inference mode, and would not outlive a graph. The weights, and what is
    made of them, may not change while this lives. A result of more bytes than its inputs is made each time: weights
    of 8 bits are to stay small.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = {_memory_of(x): x.untyped_storage() for x in weights}  # held, so that no other tensor is there
        self._results: dict[tuple[Any, ...], Any] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, or return what it made before.

        Raises: RuntimeError where a constant is written to.
        """
        kwargs = kwargs or {}
        if any(map(self._is_constant, _written(func, args, kwargs))):
            raise RuntimeError(f"{func} writes into weights, or into what is made of them")
        values, spec = tree_flatten((args, kwargs))
        tensors = _tensors(values)
        if not tensors or not all(map(self._is_constant, tensors)) or _makes_room(func):
            return func(*args, **kwargs)
        key = (func, repr(spec), *(_place(x) if isinstance(x, torch.Tensor) else repr(x) for x in values))
        if key in self._results:
            return self._results[key]
        result = func(*args, **kwargs)
        made = _tensors(result)
        view = any(map(self._is_constant, made))
        # An expanded weight has more bytes than memory.
        small = sum(x.nbytes for x in made) <= sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)
        # What is made during a capture lives in that graph alone.
        captured = any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()
        if small and not view and not captured:
            self._results[key] = result
            self._memory |= {_memory_of(x): x.untyped_storage() for x in made}
        return result

    def _is_constant(self, x: torch.Tensor) -> bool:
        return _memory_of(x) in self._memory


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _memory_of(x: torch.Tensor) -> int:
    """Memory that views share; addresses are all 0 on `meta`."""
    memory: int = x.untyped_storage()._cdata
    return memory


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    return (_memory_of(x), x.storage_offset(), x.shape, x.stride(), x.dtype)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operation writes into."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return _tensors([given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write])


def _makes_room(func: Any) -> bool:
    """Return whether a result is there to be written to: new memory, or a copy."""
    name: str = func._schema.name.removeprefix("aten::")
    return bool(func._schema.is_mutable) or name == "clone" or name.startswith("new_") or name.endswith("_like")

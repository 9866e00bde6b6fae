"""A device that refuses every wait of the host, for tests without a GPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["META", "OneDevice"]

META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Every operation inside has its tensors on one device; those of the CPU come to another without a wait.

    Numbers without dimensions are arguments of a kernel, wherever they lie.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.device.type == "cpu" for t in given):
            name = str(function)
            copies = "_to_copy" in name or "aten.to." in name or "copy_" in name
            of_host = [t for t in given if t.device.type == "cpu" and (copies or t.dim())]
            both = [*given, *(t for t in tree_leaves(result) if isinstance(t, torch.Tensor))]
            if of_host and any(t.device == META for t in both):
                waits_not = copies and (kwargs.get("non_blocking") or any(arg is True for arg in args))
                assert waits_not, f"{name} has a tensor of the CPU, {tuple(of_host[0].shape)}, among those of {META}"
        return result

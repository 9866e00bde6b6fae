"""How many bytes of tensors a piece of work holds at most: by torch's profiler, or counted at every operation."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TrackedMemory", "peak_bytes"]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors on the CPU that the work holds at a time, its result included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
    del result
    kineto = profile.profiler
    assert kineto is not None
    events = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


class TrackedMemory(TorchDispatchMode):
    """Bytes of the storages that operations of this thread have made and that still live: `now`, and at the `peak`.

    What a kernel uses inside one operation and gives back is not seen, nor views of the tensors `known`.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {t.untyped_storage()._cdata: 0 for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

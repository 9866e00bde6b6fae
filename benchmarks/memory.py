"""How much a piece of work allocates above what was there before it."""

from collections.abc import Callable

import torch

__all__ = ["peak_bytes"]


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

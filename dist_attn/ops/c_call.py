"""Calls of C kernels as they read them: what `csrc/tensors.h` says of tensors and chunks, filled in from tensors.

Shape letters: B batch, H heads, L tokens; N chunks.
"""

import ctypes
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import forward_ad

from dist_attn.ops.c_library import NoLibraryError, load_library

CHUNK = 64  # tokens of a chunk, and
BLOCK = 8  # chunks of a block of the backward pass, as in csrc/tensors.h
KEPT_STATES = 16  # of a head at most, for the backward pass, however long the sequence is
TYPES: Final = {torch.float32: 0, torch.bfloat16: 1}

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_COUNTED = ("call_bytes", "half_products", "state_floats", "forward_floats", "backward_floats")


class View(ctypes.Structure):
    """The place in memory of a [B, H, L, size] tensor: address, strides and type; by default there is none."""

    _fields_ = [("at", _POINTER), *((name, _INT) for name in ("batch", "head", "token", "type"))]


def ints(names: str) -> list[tuple[str, Any]]:
    """Fields that are whole numbers."""
    return [(name, _INT) for name in names.split()]


def pointers(names: str) -> list[tuple[str, Any]]:
    """Fields that are pointers to whole tensors."""
    return [(name, _POINTER) for name in names.split()]


def views(names: str) -> list[tuple[str, Any]]:
    """Fields that are views."""
    return [(name, View) for name in names.split()]


def view(x: torch.Tensor) -> View:
    """The view of a tensor [B, H, L] or [B, H, L, size] whose last dimension of size is contiguous."""
    batch, head, token = x.stride()[:3]
    return View(x.data_ptr(), batch, head, token, TYPES[x.dtype])


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a kernel may read x at its address: no subclass, no negated view, no transform and no tracer."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)  # a DTensor has no memory of its own
        and x.layout == torch.strided
        and not x.is_neg()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


@lru_cache(maxsize=8)
def kernels_of(operation: str, fields: type[ctypes.Structure]) -> ctypes.CDLL:
    """The compiled kernels of csrc/{operation}.c, which read calls of these fields.

    Raises: NoLibraryError where there are none.
    """
    library = load_library(Path(__file__).parent / "csrc" / f"{operation}.c")
    for name in _COUNTED:
        getattr(library, f"dist_attn_{name}").restype = _INT
    read, written = library.dist_attn_call_bytes(), ctypes.sizeof(fields)
    if read != written:
        raise NoLibraryError(
            f"the C kernels read calls of {read} bytes and Python writes {written}: csrc/{operation}_call.h and "
            f"{fields.__module__} must have the same fields in the same order"
        )
    return library


class Chunks(NamedTuple):
    """The tokens at which chunks begin, and the end, int64 [N + 1]; the chunks that begin a document, uint8 [N].

    No chunk crosses documents. The chunks of a single document are contiguous and need no tables: both are None.
    """

    number: int
    starts: torch.Tensor | None = None
    fresh: torch.Tensor | None = None

    @staticmethod
    def of(tokens: int, documents: tuple[int, ...]) -> "Chunks":
        """Cut so many tokens into chunks, where documents start at these tokens."""
        if not documents:
            return Chunks(-(-tokens // CHUNK))
        edges = sorted({0, tokens, *documents})
        starts = [at for first, last in pairwise(edges) for at in range(first, last, CHUNK)]
        begins = set(documents)
        fresh = torch.tensor([at in begins for at in starts], dtype=torch.uint8)
        return Chunks(len(starts), torch.tensor([*starts, tokens]), fresh)


class CCall:
    """A call being filled in: it keeps alive the tensors that it points to, and runs."""

    def __init__(self, library: ctypes.CDLL, fields: Any, chunks: Chunks) -> None:
        """Begin a call of these kernels; `fields` has at least batch, heads, tokens, and what is set here."""
        self.library, self.fields = library, fields
        self._alive: list[torch.Tensor | None] = []
        self.fields.threads, self.fields.num_chunks = torch.get_num_threads(), chunks.number
        blocks = -(-chunks.number // BLOCK)
        self.fields.save_every = BLOCK * max(1, -(-blocks // KEPT_STATES))
        self.point(chunks=chunks.starts, fresh=chunks.fresh)

    def point(self, **tensors: torch.Tensor | None) -> None:
        """Fields that are pointers to whole tensors; None: not there."""
        for name, tensor in tensors.items():
            whole = None if tensor is None else tensor.detach().contiguous()
            self._alive.append(whole)
            setattr(self.fields, name, None if whole is None else whole.data_ptr())

    def read(self, **tensors: torch.Tensor | None) -> None:
        """Fields that are views of [B, H, L] or [B, H, L, size], copied where they are not of the kernels' kind."""
        for name, tensor in tensors.items():
            x = tensor
            if x is not None:
                x = x.detach()
                x = x.contiguous() if x.dim() == 4 and x.stride(-1) != 1 else x
                x = x if x.dtype in TYPES else x.float()
            self.write(**{name: x})

    def write(self, **tensors: torch.Tensor | None) -> None:
        """Fields that are views of memory for results, or of what is as the kernels take it; None: nowhere."""
        for name, tensor in tensors.items():
            self._alive.append(tensor)
            setattr(self.fields, name, View() if tensor is None else view(tensor))

    def states(self) -> torch.Tensor:
        """Memory for the states that a backward pass begins with, at most 16 of each head."""
        fields = self.fields
        saved = (max(fields.num_chunks, 1) - 1) // fields.save_every
        return torch.empty(
            fields.batch * fields.heads, saved, self.library.dist_attn_state_floats(ctypes.byref(fields))
        )

    def run(self, name: str, *, backward: bool = False) -> None:
        """The kernel of this name, in working memory of its own."""
        library, fields = self.library, self.fields
        count = library.dist_attn_backward_floats if backward else library.dist_attn_forward_floats
        fields.memory_floats = count(ctypes.byref(fields))
        # No more threads than there are heads to work on, and no memory for more.
        fields.threads = max(1, min(fields.threads, fields.batch * fields.heads))
        memory = torch.empty(fields.threads, fields.memory_floats)
        fields.memory = memory.data_ptr()
        getattr(library, f"dist_attn_{name}")(ctypes.byref(fields))

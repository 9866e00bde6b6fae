"""A call of the C kernels as they read it: `csrc/call.h`, field by field, filled from tensors.

Shape letters: B batch, H heads, L tokens, K head size, D projections, M features; N chunks.
"""

import ctypes
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from dist_attn.ops.c_library import NoLibraryError, load_library
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap, FusedForm, HasFusedForm

CHUNK = 64  # tokens of a chunk, and
BLOCK = 8  # chunks of a block of the backward pass, as in csrc/call.h
KEPT_STATES = 16  # of a head at most, for the backward pass, however long the sequence is
KINDS: Final = {"gaussian": 1, "arc_cosine": 2, "elu": 3}
POLICIES: Final = {"floor": 0, "exact": 1, "clamp": 2, "sign_clamp": 3, "mass": 4, "one": 5}
TYPES: Final = {torch.float32: 0, torch.bfloat16: 1}

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class View(ctypes.Structure):
    """Where a [B, H, L, size] tensor lies; nowhere, by default."""

    _fields_ = [("at", _POINTER), *((name, _INT) for name in ("batch", "head", "token", "type"))]


def _ints(names: str) -> list[tuple[str, Any]]:
    return [(name, _INT) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [(name, _POINTER) for name in names.split()]


def _views(names: str) -> list[tuple[str, Any]]:
    return [(name, View) for name in names.split()]


class Call(ctypes.Structure):
    """One call; what is not set is not there."""

    _fields_ = [
        *_ints("batch heads tokens size values projections features"),
        *_ints("kind unit_norm policy undivided threads num_chunks save_every"),
        ("eps", ctypes.c_double),
        *_pointers("chunks fresh w"),
        *_views("q k v out log_gate key_scale"),
        *_pointers("s zm s_after zm_after den mass kept"),
        *_views("grad_out grad_q grad_k grad_v"),
        *_pointers("grad_w grad_log_gate grad_key_scale grad_s_after grad_zm_after grad_s grad_zm"),
        *_views("sums grad_sums"),
        *_pointers("memory"),
        *_ints("memory_floats"),
    ]


def view(x: torch.Tensor) -> View:
    """Of a tensor [B, H, L] or [B, H, L, size] whose last dimension of size is contiguous."""
    batch, head, token = x.stride()[:3]
    return View(x.data_ptr(), batch, head, token, TYPES[x.dtype])


@lru_cache(maxsize=1)
def kernels() -> ctypes.CDLL:
    """The compiled kernels.

    Raises: NoLibraryError where there are none.
    """
    library = load_library(Path(__file__).parent / "csrc" / "attention.c")
    for counted in (
        library.dist_attn_call_bytes,
        library.dist_attn_half_products,
        library.dist_attn_state_floats,
        library.dist_attn_forward_floats,
        library.dist_attn_backward_floats,
    ):
        counted.restype = _INT
    read, written = library.dist_attn_call_bytes(), ctypes.sizeof(Call)
    if read != written:
        raise NoLibraryError(
            f"the C kernels read calls of {read} bytes and Python writes {written}: "
            "csrc/call.h and native_call.py must have the same fields in the same order"
        )
    return library


def half_products() -> bool:
    """Whether bfloat16 tensors are multiplied by bfloat16 instructions here, in place of float32 ones.

    Raises: NoLibraryError where there are no kernels.
    """
    return bool(kernels().dist_attn_half_products())


class Chunks(NamedTuple):
    """Where chunks begin, and the end, int64 [N + 1]; which of them begin a document, uint8 [N]. None lies in two.

    Of one document they lie side by side and need no tables.
    """

    number: int
    starts: torch.Tensor | None = None
    fresh: torch.Tensor | None = None

    @staticmethod
    def of(tokens: int, documents: tuple[int, ...]) -> "Chunks":
        """Those of so many tokens, where documents start at these."""
        if not documents:
            return Chunks(-(-tokens // CHUNK))
        edges = sorted({0, tokens, *documents})
        starts = [at for first, last in pairwise(edges) for at in range(first, last, CHUNK)]
        begins = set(documents)
        fresh = torch.tensor([at in begins for at in starts], dtype=torch.uint8)
        return Chunks(len(starts), torch.tensor([*starts, tokens]), fresh)


def num_features(feature_map: FeatureMap | None, size: int) -> int:
    """M of a map of heads of this size."""
    if feature_map is None:
        return size
    tensors = feature_map.tensors()
    projections = tensors[0].shape[1] if tensors else size
    return 2 * projections if _form(feature_map).kind == "gaussian" else projections


def _form(feature_map: FeatureMap) -> FusedForm:
    assert isinstance(feature_map, HasFusedForm)  # `choose` lets no other come here
    return feature_map.fused_form()


class KernelCall:
    """A call being filled in: it keeps alive the tensors that it points to, and runs."""

    def __init__(self, tokens: torch.Tensor, values: int, chunks: Chunks) -> None:
        """For queries or keys of this shape, [B, H, L, K], and so many values."""
        batch, heads, length, size = tokens.shape
        self.fields = Call(batch, heads, length, size, values)
        self._alive: list[torch.Tensor | None] = []
        self.fields.threads, self.fields.num_chunks = torch.get_num_threads(), chunks.number
        blocks = -(-chunks.number // BLOCK)
        self.fields.save_every = BLOCK * max(1, -(-blocks // KEPT_STATES))
        self.point(chunks=chunks.starts, fresh=chunks.fresh)

    def compute(self, feature_map: FeatureMap | None, w_HDK: torch.Tensor | None, policy: Denominator) -> None:
        """By which features and with which denominators."""
        fields = self.fields
        fields.projections = fields.size if w_HDK is None else w_HDK.shape[1]
        fields.features = num_features(feature_map, fields.size)
        if feature_map is not None:
            form = _form(feature_map)
            fields.kind, fields.unit_norm = KINDS[form.kind], form.unit_norm
        fields.policy, fields.eps = POLICIES[policy.kind], policy.eps
        self.point(w=None if w_HDK is None else w_HDK.float())

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
        saved = (fields.num_chunks - 1) // fields.save_every
        return torch.empty(fields.batch * fields.heads, saved, kernels().dist_attn_state_floats(ctypes.byref(fields)))

    def run(self, name: str, *, backward: bool = False) -> None:
        """The kernel of this name, in working memory of its own."""
        library, fields = kernels(), self.fields
        count = library.dist_attn_backward_floats if backward else library.dist_attn_forward_floats
        fields.memory_floats = count(ctypes.byref(fields))
        # No more threads than there are heads to work on, and no memory for more.
        fields.threads = max(1, min(fields.threads, fields.batch * fields.heads))
        memory = torch.empty(fields.threads, fields.memory_floats)
        fields.memory = memory.data_ptr()
        getattr(library, f"dist_attn_{name}")(ctypes.byref(fields))

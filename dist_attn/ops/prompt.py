"""A layer of a model over many tokens of a text, in one call of a C kernel with products of bfloat16 numbers.

It is for processors where such products are fast, as in `fused_encoder`. What goes from layer to layer is float32. A
token's numbers have the same bits however many tokens are read at once and by however many threads.

Shape letters: L tokens, D model width, R rotated numbers of a head.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from dist_attn.ops.c_call import ints, pointers
from dist_attn.ops.c_library import NoLibraryError, load_library
from dist_attn.ops.decode_step import ADD, STORE, Attention, Operation, Operations, Product, cache_addresses, takes
from dist_attn.ops.softmax_attention.cache import KeyValueCache

__all__ = ["ALIGNED", "Memory", "PromptLayers", "takes_prompts"]

ALIGNED: Final = 64  # bytes
_OF_LAYER: Final = 5  # operations: to queries, keys and values, attention, out of it, gates, down
_SIDE: Final = 32  # of the squares in which all is multiplied


class _Reading(ctypes.Structure):
    """Mirrors `reading` of csrc/prompt.c."""

    _fields_ = [
        *pointers("operations"),
        *ints("rows size threads"),
        *pointers("x keys values"),
        *ints("key_group value_group tokens"),
        *pointers("cosine sine work"),
    ]


class Memory(NamedTuple):
    """Memory for so many threads to work in."""

    threads: int
    numbers: torch.Tensor


class PromptLayers(Operations):
    """The layers of a model, five operations each."""

    def read(
        self, layer: int, x_LD: torch.Tensor, cache: KeyValueCache, turns: tuple[torch.Tensor, ...], work: "Memory"
    ) -> KeyValueCache:
        """Put tokens through a layer, in place, and return the cache behind them.

        x [L, D] begins at a multiple of `ALIGNED` bytes; `turns` are cosines and sines [L, R] in float32.
        """
        k, v = (like.expand(-1, -1, len(x_LD), -1) for like in self._likes[layer])
        after = cache.with_places(k, v)
        reading = self._reading(layer, x_LD, after, turns, work.threads)
        reading.work = work.numbers.data_ptr()
        _kernels().dist_attn_read(ctypes.byref(reading))
        return after

    def memory(self, x_LD: torch.Tensor, cache: KeyValueCache, turns: tuple[torch.Tensor, ...]) -> "Memory":
        """Memory in which layers are read that have such a cache."""
        threads = torch.get_num_threads()
        reading = self._reading(0, x_LD, cache, turns, threads)
        reading.tokens += len(x_LD)
        nbytes = _kernels().dist_attn_prompt_bytes(ctypes.byref(reading))
        return Memory(threads, torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def _reading(
        self, layer: int, x_LD: torch.Tensor, cache: KeyValueCache, turns: tuple[torch.Tensor, ...], threads: int
    ) -> _Reading:
        (keys, values, key_group, value_group, tokens) = cache_addresses(cache)[0]
        return _Reading(
            operations=ctypes.addressof(self._operations[layer * _OF_LAYER]), rows=len(x_LD), size=x_LD.shape[1],
            threads=threads, x=x_LD.data_ptr(), keys=keys, values=values, key_group=key_group,
            value_group=value_group, tokens=tokens, cosine=turns[0].data_ptr(), sine=turns[1].data_ptr(),
        )  # fmt: skip


def takes_prompts(operations: Sequence[Operation]) -> bool:
    """Return whether the kernel takes layers of these operations, all weights bfloat16."""
    sizes = {_sizes(operations[i : i + _OF_LAYER]) for i in range(0, len(operations), _OF_LAYER)}
    alike = len(sizes) == 1 and None not in sizes  # so that memory for one is for all
    return alike and takes(operations) and _kernels() is not None


def _sizes(layer: Sequence[Operation]) -> tuple[tuple[int, ...], ...] | None:
    """The sizes of a layer; None for another than the kernel takes."""
    match layer:
        case [Product() as qkv, Attention() as attention, Product() as out, Product() as gates, Product() as down]:
            pass
        case _:
            return None
    products = (qkv, out, gates, down)
    matrices = [matrix for product in products for matrix in product.matrices]
    keys, values = attention.query + attention.heads * attention.size, attention.groups * attention.size
    if (
        (qkv.then, out.then) != (STORE, ADD)
        or (attention.query, attention.key, attention.value) != (qkv.inputs, keys, keys + values)
        or any(m.stored_as != "bfloat16" or len(m.weight) % _SIDE for m in matrices)
    ):
        return None
    of_attention = (attention.heads, attention.groups, attention.size, attention.values)
    return of_attention, *((one.inputs, *(len(matrix.weight) for matrix in one.matrices)) for one in products)


@lru_cache(maxsize=1)
def _kernels() -> Any:
    try:
        library = load_library(Path(__file__).parent / "csrc" / "prompt.c")
    except NoLibraryError:
        return None
    library.dist_attn_prompt_bytes.restype, library.dist_attn_read.restype = ctypes.c_int64, None
    return library if library.dist_attn_squares_are_fast() else None

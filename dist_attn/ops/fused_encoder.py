"""An encoder of texts by one C kernel, with products of bfloat16 numbers: weights are packed once, all else is fused.

It is for processors where such products are faster than others (AMX's, and AVX-512's but Intel's). A row of a product
depends on no other and a text on no other text, so that a text has the same bits whatever is read beside it, by however
many threads.

Shape letters: B batch, L tokens, D model width, O outputs, I inputs.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.ops.c_call import ints, pointers
from dist_attn.ops.c_library import NoLibraryError, load_library
from dist_attn.ops.processor import on_large_pages

__all__ = ["FusedEncoder", "takes_encoder"]

_SIDE = 32  # of the squares in which all is multiplied


def _norm(name: str) -> list[tuple[str, Any]]:
    return [*pointers(f"{name}_weight {name}_bias"), (f"{name}_eps", ctypes.c_double)]


class _Layer(ctypes.Structure):
    """Mirrors `layer` of csrc/encoder.c."""

    _fields_ = [
        *pointers("qkv_weight qkv_bias out_weight out_bias up_weight up_bias down_weight down_bias"),
        *_norm("mixing"),
        *_norm("mlp"),
    ]


class _Call(ctypes.Structure):
    """Mirrors `call` of csrc/encoder.c."""

    _fields_ = [
        *ints("size inner heads num_layers texts threads"),
        *pointers("starts tokens of_tokens of_positions"),
        *_norm("first"),
        ("layers", ctypes.POINTER(_Layer)),
        *pointers("y"),
    ]


def takes_encoder(size: int = _SIDE, heads: int = 1, inner: int = _SIDE) -> bool:
    """Return whether this machine has the kernel, for layers of `size`, so many heads and `inner` units of the MLP."""
    return not any(n % _SIDE for n in (size, inner, size // heads)) and _kernel() is not None


class FusedEncoder(nn.Module):
    """Norms of sums of tokens' and positions' vectors, then layers: norm(x + attention(x)), norm(x + MLP(x)).

    Attention is softmax over all keys of a text, the MLP has a GELU; what goes from layer to layer is float32. A layer
    is given by the maps to queries, keys and values, out of attention, into and out of the MLP, and by its two norms,
    all of which are copied; the table of tokens [.., D] is not, and positions [.., D] are those of a text.
    """

    def __init__(
        self,
        tables: tuple[torch.Tensor, torch.Tensor],
        norm: nn.LayerNorm,
        layers: Sequence[tuple[Sequence[nn.Linear], Sequence[nn.LayerNorm]]],
        heads: int,
    ) -> None:
        super().__init__()
        self._alive: list[torch.Tensor] = []
        size, inner = tables[0].shape[1], layers[0][0][2].out_features
        self._layers = (_Layer * len(layers))()
        self._call = _Call(size=size, inner=inner, heads=heads, num_layers=len(layers), layers=self._layers)
        self._point(self._call, of_tokens=tables[0], of_positions=tables[1])
        self._point_at_norm(self._call, "first", norm)
        words = [_packed(linear.weight) for linears, _ in layers for linear in linears]
        packed = on_large_pages(torch.empty(sum(map(len, words)), dtype=torch.int32, device="cpu"))
        parts = iter(torch.cat(words, out=packed).split([*map(len, words)]))
        for made, (linears, norms) in zip(self._layers, layers, strict=True):
            for name, linear in zip(("qkv", "out", "up", "down"), linears, strict=True):
                bias = torch.zeros(linear.out_features, device="cpu") if linear.bias is None else linear.bias.clone()
                self._point(made, **{f"{name}_weight": next(parts), f"{name}_bias": bias})
            for name, norm in zip(("mixing", "mlp"), norms, strict=True):
                self._point_at_norm(made, name, norm)

    def forward(self, tokens_BL: torch.Tensor, documents: Sequence[int] = ()) -> torch.Tensor:
        """Hidden states [B, L, D] of tokens that there are; `documents` are where those begin that each row has.

        Raises: InputError where there is no memory to work in.
        """
        kernel, (batch, length) = _kernel(), tokens_BL.shape
        assert kernel is not None
        starts = [row * length + at for row in range(batch) for at in sorted({0, *documents})]
        starts_N = torch.tensor([*starts, batch * length], dtype=torch.int64, device="cpu")
        tokens_BL = tokens_BL.to(torch.int64).contiguous()
        y_BLD = torch.empty((batch, length, self._call.size), device="cpu")
        call = _Call.from_buffer_copy(self._call)
        call.texts, call.threads = len(starts), torch.get_num_threads()
        call.starts, call.tokens, call.y = starts_N.data_ptr(), tokens_BL.data_ptr(), y_BLD.data_ptr()
        if not kernel(ctypes.byref(call)):
            raise InputError(f"there is no memory to read {length} tokens at once; give shorter texts")
        return y_BLD

    def _point(self, to: ctypes.Structure, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            self._alive.append(tensor.detach().contiguous())
            setattr(to, name, self._alive[-1].data_ptr())

    def _point_at_norm(self, to: ctypes.Structure, name: str, norm: nn.LayerNorm) -> None:
        self._point(to, **{f"{name}_weight": norm.weight.clone(), f"{name}_bias": norm.bias.clone()})
        setattr(to, f"{name}_eps", norm.eps)


def _packed(w_OI: torch.Tensor) -> torch.Tensor:
    """Words of two neighbouring inputs' weights, of sixteen outputs side by side: [O / 16, I / 2, 16] int32, flat."""
    words_OI: torch.Tensor = w_OI.detach().bfloat16().contiguous().view(torch.int32)
    return words_OI.reshape(len(w_OI) // 16, 16, -1).transpose(1, 2).flatten()


@lru_cache(maxsize=1)
def _kernel() -> Any:
    try:
        library = load_library(Path(__file__).parent / "csrc" / "encoder.c")
    except NoLibraryError:
        return None
    library.dist_attn_call_bytes.restype = library.dist_attn_encode.restype = ctypes.c_int64
    if not library.dist_attn_squares_are_fast():
        return None
    assert library.dist_attn_call_bytes() == ctypes.sizeof(_Call)
    return library.dist_attn_encode

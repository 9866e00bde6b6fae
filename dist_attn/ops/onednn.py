"""float32 products of many rows by oneDNN, for processors of AMD.

There MKL, which torch multiplies with, uses AVX2 where oneDNN uses AVX-512: on an EPYC (family 26) a core does 100
GFLOP/s by MKL and 235 by oneDNN.

Shape letters: N rows, of which R are multiplied together, I inputs, O outputs.
"""

from bisect import bisect_left
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from dist_attn.ops.c_call import is_plain

__all__ = ["mkl_lacks_avx512", "onednn_linear", "takes_onednn_linear"]

ROWS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""The numbers of rows that are multiplied at once: oneDNN keeps up to 1 MiB of code for each, and for each matrix."""
TOGETHER = 512  # rows of a part, where there are more and `ROWS` does not have their number
MANY_PRODUCTS = 1 << 20  # what MKL multiplies in the 10 microseconds that oneDNN takes to begin


def takes_onednn_linear(x: torch.Tensor, w_OI: torch.Tensor) -> bool:
    """Return whether to multiply these by oneDNN: many rows in float32, without gradients, where that is faster."""
    return (
        not torch.compiler.is_compiling()
        and x.dtype == w_OI.dtype == torch.float32
        and x.device.type == w_OI.device.type == "cpu"
        and w_OI.dim() == 2
        and x.shape[-1] == w_OI.shape[-1]
        and x.numel() >= ROWS[0] * x.shape[-1]
        and x.numel() * len(w_OI) >= MANY_PRODUCTS
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._is_torch_function_mode_enabled()  # such as those of `whole_vectors`
        and is_plain(x)
        and is_plain(w_OI)
        and mkl_lacks_avx512()
    )


def onednn_linear(x: torch.Tensor, w_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` by oneDNN, where `takes_onednn_linear`.

    On one thread a row's bits depend on no other row, nor on how many there are.

    Shapes: x [..., I], w [O, I], bias [O] -> [..., O].
    """
    x_NI, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], len(w_OI))
    bias_O = None if bias_O is None else bias_O.expand(len(w_OI)).contiguous()
    if len(x_NI) <= TOGETHER or len(x_NI) in ROWS:
        return _filled_up(x_NI, w_OI, bias_O).view(shape)
    y_NO = x.new_empty((len(x_NI), len(w_OI)))
    for some_RI, place_RO in zip(x_NI.split(TOGETHER), y_NO.split(TOGETHER), strict=True):
        place_RO.copy_(_filled_up(some_RI, w_OI, bias_O))
    return y_NO.view(shape)


def _filled_up(x_RI: torch.Tensor, w_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """The product of some rows with zeros behind them, up to the next number of `ROWS`."""
    rows = len(x_RI)
    room = ROWS[bisect_left(ROWS, rows)] - rows
    filled_RI = F.pad(x_RI, (0, 0, 0, room)) if room else x_RI
    y_RO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled_RI, w_OI, bias_O, "none", [], "")
    return y_RO[:rows]


@cache
def mkl_lacks_avx512() -> bool:
    """Return whether this is a processor of AMD with AVX-512."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False

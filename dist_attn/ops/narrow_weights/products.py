"""Products with narrow weights as they are fast: inputs and outputs rounded to bfloat16, sums in float32.

Of int8 weights there are two. "packed" reads them as they are (torch's kernel for CPUs with AVX2 or AVX-512), which is
fastest while memory is what a product waits for; "widened" makes bfloat16 numbers of them first, exactly, and takes
the machine's bfloat16 product, which is fastest for many rows and runs everywhere. Which one a product takes depends on
the machine and on how many rows there are, and on nothing else.

torch's dynamic int8 products, which round inputs to 8 bits too, are faster still and not taken: they find one scale
for all rows of a batch, so that a session's numbers would depend on who decodes beside it.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F

from dist_attn.ops.narrow_weights.naive import bfloat16_linear_naive, int8_linear_naive

__all__ = [
    "PACKED_ROWS",
    "Bfloat16Product",
    "Int8Product",
    "bfloat16_linear",
    "bfloat16_product",
    "int8_linear",
    "int8_product",
]

Int8Product = Literal["packed", "widened"]
Bfloat16Product = Literal["bfloat16", "float32"]

PACKED_ROWS = 16
"""With more rows widening costs less than it saves: on an EPYC with AVX-512 both took as long for 12 to 16 rows."""

# The kernel reads that many inputs at a time, and past the end of a row that is no multiple of it.
_PACKED_INPUTS = 16
_CAPABILITY = torch.backends.cpu.get_cpu_capability()
_CPU_HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def int8_product(device: torch.device, inputs: int) -> Int8Product:
    """How few rows are multiplied with int8 weights of so many inputs on this machine."""
    packed = device.type == "cpu" and _CAPABILITY in ("AVX2", "AVX512") and inputs % _PACKED_INPUTS == 0
    return "packed" if packed and inputs else "widened"


def bfloat16_product(device: torch.device) -> Bfloat16Product:
    """In which precision bfloat16 numbers are multiplied here: a CPU without such instructions makes them float32."""
    return "bfloat16" if device.type != "cpu" or _CPU_HAS_BFLOAT16 else "float32"


def int8_linear(x: torch.Tensor, q_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """x w^T, where w is what `round_rows` has rounded.

    Shapes: x [..., I], q [O, I] int8, scale [O] bfloat16 -> [..., O] in x's dtype. x is rounded to bfloat16, and so is
    the sum; in float64 nothing is.
    Cost: O I bytes are read for up to PACKED_ROWS rows where the product is packed; else 5 O I are moved.
    """
    if x.dtype == torch.float64:
        return int8_linear_naive(x, q_OI, scale_O)
    x_NI = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if len(x_NI) <= PACKED_ROWS and int8_product(x.device, q_OI.shape[1]) == "packed":
        y_NO = torch._weight_int8pack_mm(x_NI.bfloat16().contiguous(), q_OI, scale_O).to(x.dtype)
    else:
        y_NO = (bfloat16_linear(x_NI, q_OI.bfloat16()) * scale_O).to(x.dtype)
    return y_NO.view(*x.shape[:-1], len(q_OI))


def bfloat16_linear(x: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    """x w^T with bfloat16 weights.

    Shapes: x [..., I], w [O, I] bfloat16 -> [..., O] in x's dtype. x is rounded to bfloat16, and so is the sum; in
    float64 nothing is.
    """
    if x.dtype == torch.float64:
        return bfloat16_linear_naive(x, w_OI)
    rounded = x.bfloat16()
    if bfloat16_product(x.device) == "float32":
        return F.linear(rounded.float(), w_OI.float()).bfloat16().to(x.dtype)
    return F.linear(rounded, w_OI).to(x.dtype)

"""Products with narrow weights as they are fast: inputs and results rounded to bfloat16, sums in float32.

A matrix is kept as 8-bit integers with one scale for each row, symmetric around 0. Of products with int8 weights there
are two. "packed" reads them as they are (torch's kernel for CPUs with AVX2 or AVX-512), which is fastest while memory
is what a product waits for; "widened" makes bfloat16 numbers of them first, exactly, and takes the machine's bfloat16
product, which is fastest for many rows and runs everywhere. What is read is always widened, so that nothing depends on
how it was cut; a step of decoding is packed where the machine has the kernel, the rows have a number of inputs that it
takes, and there are few sequences (`int8_product`).

Both round after the scale. A bfloat16 product has rounded its sum before it as well, as that is what it puts out.

torch's dynamic int8 products, which round inputs to 8 bits too, are faster still and not taken: they find one scale
for all rows of a batch, so that a session's numbers would depend on who decodes beside it.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from dist_attn.errors import InputError, ShapeError

LARGEST = 127  # and -127: -128 has no counterpart, so it is never used
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
NUMBERS_AT_ONCE = 1 << 18  # that are rounded: as float32 they are large beside what they become


def round_rows(w_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest multiples of a scale: q [O, I] int8 and scale [O] bfloat16, w about q times scale.

    A scale is the row's largest number / 127, rounded up to a number that bfloat16 holds: fast products take scales of
    that type, and so all products are of the same weights. Every number is at most half a scale off, and a scale at
    most 1 + 2^-7 times the row's largest number / 127.

    Raises: ShapeError for what is no matrix, InputError for NaN or infinite numbers.
    """
    if w_OI.dim() != 2:
        raise ShapeError(f"weights have shape {tuple(w_OI.shape)}; rounded by rows are matrices [O, I]")
    q_OI = torch.empty(w_OI.shape, dtype=torch.int8, device=w_OI.device)
    scale_O = torch.empty(w_OI.shape[0], dtype=torch.bfloat16, device=w_OI.device)
    rows = max(1, NUMBERS_AT_ONCE // max(1, w_OI.shape[1]))
    for w_RI, q_RI, scale_R in zip(w_OI.detach().split(rows), q_OI.split(rows), scale_O.split(rows), strict=True):
        w_RI = w_RI.float()
        largest_R = w_RI.abs().amax(dim=1) if w_RI.shape[1] else w_RI.new_zeros(w_RI.shape[0])
        if not bool(largest_R.isfinite().all()):
            raise InputError("the weights hold NaN or infinite numbers, which have no 8-bit form; train it again")
        scale_R.copy_(_up_to_bfloat16((largest_R / LARGEST).clamp_min(SMALLEST_SCALE)))
        q_RI.copy_((w_RI / scale_R[:, None].float()).round().clamp(-LARGEST, LARGEST))
    return q_OI, scale_O


def widen_rows(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that rows [..., I] stand for with their scales [...]."""
    return q.to(dtype) * scale[..., None].to(dtype)


def _up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not below a positive float32."""
    near = x.bfloat16()
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near)


Int8Product = Literal["packed", "widened"]
Bfloat16Product = Literal["bfloat16", "float32"]

PACKED_ROWS = 16
"""Steps of more sequences are widened: on an EPYC with AVX-512 both took as long for 12 to 16 of them."""

# The kernel reads that many inputs at a time, and past the end of a row that is no multiple of it.
_PACKED_INPUTS = 16
_CAPABILITY = torch.backends.cpu.get_cpu_capability()
_CPU_HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def int8_product(device: torch.device, inputs: int, sequences: int = 1) -> Int8Product:
    """The product that decodes so many sequences with int8 weights of so many inputs on this machine."""
    packed = device.type == "cpu" and _CAPABILITY in ("AVX2", "AVX512") and inputs % _PACKED_INPUTS == 0
    return "packed" if packed and inputs and sequences <= PACKED_ROWS else "widened"


def bfloat16_product(device: torch.device) -> Bfloat16Product:
    """The precision of products of bfloat16 numbers here: a CPU without such instructions makes them float32."""
    return "bfloat16" if device.type != "cpu" or _CPU_HAS_BFLOAT16 else "float32"


def int8_linear(x: torch.Tensor, q_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """x w^T, where w is what `round_rows` has rounded, widened for any number of rows.

    Shapes: x [..., I], q [O, I] int8, scale [O] bfloat16 -> [..., O] in x's dtype. x is rounded to bfloat16, and so is
    the result; in float64 nothing is.
    Cost: O I bytes are read, and 2 O I written and read again; 4 O I where a CPU multiplies in float32.
    """
    if x.dtype == torch.float64:
        return int8_linear_naive(x, q_OI, scale_O)
    return _rounded_into(_sums(x, q_OI).mul_(scale_O), x.dtype)


def int8_step_linear(x_BI: torch.Tensor, q_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """`int8_linear` for one token of each sequence, by the product that `int8_product` names.

    Shapes: x [B, I], q [O, I] int8, scale [O] bfloat16 -> [B, O] in x's dtype.
    Cost: O I bytes are read where it is packed.
    """
    if x_BI.dtype == torch.float64 or int8_product(x_BI.device, q_OI.shape[1], len(x_BI)) == "widened":
        return int8_linear(x_BI, q_OI, scale_O)
    return torch._weight_int8pack_mm(x_BI.bfloat16().contiguous(), q_OI, scale_O).to(x_BI.dtype)


def bfloat16_linear(x: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    """x w^T with bfloat16 weights.

    Shapes: x [..., I], w [O, I] bfloat16 -> [..., O] in x's dtype. x is rounded to bfloat16, and so is the sum; in
    float64 nothing is.
    """
    if x.dtype == torch.float64:
        return bfloat16_linear_naive(x, w_OI)
    return _rounded_into(_sums(x, w_OI), x.dtype)


def _sums(x: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    """The products of x rounded to bfloat16: in bfloat16, or in float32 where the machine multiplies in that."""
    if bfloat16_product(x.device) == "float32":
        return F.linear(x.bfloat16().float(), w_OI.float())
    return F.linear(x.bfloat16(), w_OI.bfloat16())


def _rounded_into(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y rounded to bfloat16, as `dtype`; a float32 y is written over, as another one of it would be large."""
    return y.copy_(y.bfloat16()) if y.dtype == dtype == torch.float32 else y.bfloat16().to(dtype)


def int8_linear_naive(x: torch.Tensor, q_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """x (q scale)^T in the precision of x, and rounded in no other way. See `int8_linear` and `int8_step_linear`."""
    w_OI = q_OI.to(x.dtype) * scale_O.to(x.dtype)[:, None]
    return x @ w_OI.T


def bfloat16_linear_naive(x: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    """x w^T in the precision of x, and rounded in no other way. See `bfloat16_linear`."""
    return x @ w_OI.to(x.dtype).T

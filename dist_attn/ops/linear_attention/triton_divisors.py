"""The kernel of the backward pass through a division: of every query its divisor, and the gradients behind it.

Shape letters: B batch, H heads, G = B H, L tokens, N chunks of T tokens, V values.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import load_tile
from dist_attn.ops.linear_attention.triton_outputs import guard


@triton.jit
def larger_share(a, b):
    """The derivative of max(a, b) by a: half where both are equal, as in torch."""
    return tl.where(a == b, 0.5, tl.where(a < b, 0.0, 1.0))


@triton.jit
def guard_derivatives(denominator, mass, eps, KIND: tl.constexpr):
    """The derivatives of `guard` by the denominator and by the mass."""
    zeros = tl.zeros_like(denominator)
    if KIND == "exact":
        return zeros + 1.0, zeros
    elif KIND == "clamp":
        return tl.where(denominator < eps, 0.0, 1.0), zeros
    elif KIND == "sign_clamp":
        return tl.where(tl.abs(denominator) < eps, 0.0, 1.0), zeros
    elif KIND == "abs_clamp":
        sign = tl.where(denominator < 0.0, -1.0, tl.where(denominator == 0.0, 0.0, 1.0))
        return tl.where(tl.abs(denominator) < eps, 0.0, sign), zeros
    elif KIND == "one":
        return zeros, zeros
    elif KIND == "mass":
        return zeros, tl.where(mass == 0.0, 0.0, 1.0)
    else:
        floor = eps * mass
        seen = tl.where(tl.maximum(denominator, floor) == 0.0, 0.0, 1.0)
        return seen * larger_share(denominator, floor), seen * eps * larger_share(floor, denominator)


@triton.jit
def divisor_rows_kernel(
    grad_out_ptr, out_ptr, denominator_ptr, mass_ptr, rows_ptr,
    grad_stride_b, grad_stride_h, grad_stride_l, out_stride_b, out_stride_h, out_stride_l,
    den_stride_b, den_stride_h, den_stride_l, mass_stride_b, mass_stride_h, mass_stride_l,
    L, N, H, V, eps, KIND: tl.constexpr, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One over the divisor, and the gradients of denominator and mass, [3, G, N T]; 0 behind the end. Grid: G N."""
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    start = chunk.to(tl.int64) * T
    grad_out_ptr += batch * grad_stride_b + head * grad_stride_h + start * grad_stride_l
    out_ptr += batch * out_stride_b + head * out_stride_h + start * out_stride_l
    # dO . O is what the divisor's gradient is made of: o = n / d, and so dd = -(dO . n) / d^2.
    product = tl.zeros((T,), tl.float32)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        grad_out = load_tile(grad_out_ptr, rows, values, grad_stride_l, valid, V)
        out = load_tile(out_ptr, rows, values, out_stride_l, valid, V)
        product += tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), axis=1)
    den_ptr = denominator_ptr + batch * den_stride_b + head * den_stride_h
    mass_ptr += batch * mass_stride_b + head * mass_stride_h
    denominator = tl.load(den_ptr + tokens.to(tl.int64) * den_stride_l, mask=valid, other=1.0)
    mass = tl.load(mass_ptr + tokens.to(tl.int64) * mass_stride_l, mask=valid, other=1.0)
    inverse = 1.0 / guard(denominator, mass, eps, KIND)
    by_denominator, by_mass = guard_derivatives(denominator, mass, eps, KIND)
    rows_ptr += group * N * T + tokens
    size = tl.num_programs(0).to(tl.int64) * T
    tl.store(rows_ptr, tl.where(valid, inverse, 0.0))
    # Infinity by 0 is no number.
    tl.store(rows_ptr + size, tl.where(valid & (by_denominator != 0.0), -product * inverse * by_denominator, 0.0))
    tl.store(rows_ptr + 2 * size, tl.where(valid & (by_mass != 0.0), -product * inverse * by_mass, 0.0))

"""Kernels of attention that is not causal: sums over all keys of a sequence, and queries that read one state.

Each serves the other's backward pass: the gradient of a state is a sum over queries, that of values a read-out.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import feature_tile, load_tile, operand, product, store_tile
from dist_attn.ops.linear_attention.triton_outputs import guard

__all__ = ["read_kernel", "sequence_sums_kernel"]


@triton.jit
def sequence_sums_kernel(
    x_ptr, y_ptr, w_ptr, weight_ptr, z_weight_ptr, mass_weight_ptr, sums_ptr, zm_ptr,
    x_stride_b, x_stride_h, x_stride_l, y_stride_b, y_stride_h, y_stride_l,
    L, N, H, K, D, M, V, scale, splits, length,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Of each split of `length` chunks: sum of weight_t phi(x_t) y_t^T, of z_weight_t phi(x_t), of mass_weight_t.

    Shapes: weights [G, N T]; sums [G, splits, M, V], zm [G, splits, M + 1]. Grid: G splits x blocks of values x blocks
    of projections.
    """
    program = tl.program_id(0)
    group, split = (program // splits).to(tl.int64), program % splits
    batch, head = group // H, group % H
    first_chunk = split * length
    start = first_chunk.to(tl.int64) * T
    x_ptr += batch * x_stride_b + head * x_stride_h + start * x_stride_l
    y_ptr += batch * y_stride_b + head * y_stride_h + start * y_stride_l
    rows = tl.arange(0, T)
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    outputs = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    total_second = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    z = tl.zeros((BLOCK_D,), tl.float32)
    z_second = tl.zeros((BLOCK_D,), tl.float32)
    mass = tl.zeros((T,), tl.float32)
    for chunk in range(first_chunk, tl.minimum(first_chunk + length, N)):
        tokens = chunk * T + rows
        valid = tokens < L
        first, second = feature_tile(
            x_ptr, x_stride_l, rows, valid, w_ptr + head * D * K, outputs, K, D, scale,
            MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        at = group * N * T + tokens
        y = load_tile(y_ptr, rows, values, y_stride_l, valid, V).to(tl.float32)
        y = operand(y * tl.load(weight_ptr + at)[:, None], PRECISION)
        z_weight = tl.load(z_weight_ptr + at)[:, None]
        total = product(tl.trans(first), y, total, PRECISION)
        z += tl.sum(first.to(tl.float32) * z_weight, axis=0)
        if MAP == "gaussian":
            total_second = product(tl.trans(second), y, total_second, PRECISION)
            z_second += tl.sum(second.to(tl.float32) * z_weight, axis=0)
        mass += tl.load(mass_weight_ptr + at)
        x_ptr += T * x_stride_l
        y_ptr += T * y_stride_l

    there = (outputs[:, None] < D) & (values[None, :] < V)
    at_sums = sums_ptr + (group * splits + split) * M * V + outputs[:, None] * V + values[None, :]
    tl.store(at_sums, total, mask=there)
    if MAP == "gaussian":
        tl.store(at_sums + D * V, total_second, mask=there)
    if tl.program_id(1) == 0:
        zm_ptr += (group * splits + split) * (M + 1)
        tl.store(zm_ptr + outputs, z, mask=outputs < D)
        if MAP == "gaussian":
            tl.store(zm_ptr + D + outputs, z_second, mask=outputs < D)
        if tl.program_id(2) == 0:
            tl.store(zm_ptr + M, tl.sum(mass, axis=0))


@triton.jit
def read_kernel(
    x_ptr, w_ptr, weight_ptr, state_ptr, zm_ptr, out_ptr, denominator_ptr,
    x_stride_b, x_stride_h, x_stride_l, out_stride_b, out_stride_h, out_stride_l,
    L, N, H, K, D, M, V, scale, eps,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """weight_t phi(x_t) S over the divisor, [G, L, V], and phi(x_t) z before any policy, [G, L], of one chunk.

    Shapes: weight [G, N T], state [G, M, V], zm [G, M + 1]. Grid: G N chunks x blocks of values.
    """
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    x_ptr += batch * x_stride_b + head * x_stride_h + start * x_stride_l
    out_ptr += batch * out_stride_b + head * out_stride_h + start * out_stride_l
    state_ptr += group * M * V
    zm_ptr += group * (M + 1)
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    num = tl.zeros((T, BLOCK_V), tl.float32)
    den = tl.zeros((T,), tl.float32)
    for d in range(0, D, BLOCK_D):
        outputs = d + tl.arange(0, BLOCK_D)
        there = (outputs[:, None] < D) & (values[None, :] < V)
        first, second = feature_tile(
            x_ptr, x_stride_l, rows, valid, w_ptr + head * D * K, outputs, K, D, scale,
            MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        at = state_ptr + outputs[:, None] * V + values[None, :]
        num = product(first, operand(tl.load(at, mask=there, other=0.0), PRECISION), num, PRECISION)
        z = tl.load(zm_ptr + outputs, mask=outputs < D, other=0.0)
        den += tl.sum(first.to(tl.float32) * z[None, :], axis=1)
        if MAP == "gaussian":
            state = tl.load(at + D * V, mask=there, other=0.0)
            num = product(second, operand(state, PRECISION), num, PRECISION)
            z = tl.load(zm_ptr + D + outputs, mask=outputs < D, other=0.0)
            den += tl.sum(second.to(tl.float32) * z[None, :], axis=1)
    if HAS_WEIGHT:
        num = num * tl.load(weight_ptr + group * N * T + tokens)[:, None]
    mass = tl.zeros((T,), tl.float32) + tl.load(zm_ptr + M)
    divisor = tl.where(valid, guard(den, mass, eps, KIND), 1.0)
    store_tile(out_ptr, out_stride_l, rows, valid, values, V, num / divisor[:, None])
    if tl.program_id(1) == 0:
        tl.store(denominator_ptr + group * L + tokens, den, mask=valid)

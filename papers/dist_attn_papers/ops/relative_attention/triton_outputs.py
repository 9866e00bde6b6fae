"""Kernels of relative attention's outputs: position scores, sums of chunks, and one chunk of queries at a time.

A chunk of queries meets the keys of its own chunk and of as many next to it as its windows reach into. Position scores
stand in memory as [G, L, R], a row per query, and are read askew, row r of query i for key i + r - k; windows of values
never exist. Keys of all chunks further away have the score of the outermost row, so sums of values are enough.

Every tensor of one number a token is float32 [G, N T] for N chunks of T tokens, the last filled up with zeros.

Shape letters: B batch, H heads, G = B H, L queries in N chunks, S keys in NK chunks, T tokens of a chunk, K features,
V values, R rows of relative positions.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import (
    load_projections,
    load_tile,
    operand,
    parts_product,
    product,
    store_tile,
)


@triton.jit
def positions_kernel(
    q_ptr, rp_ptr, positions_ptr, q_stride_b, q_stride_h, q_stride_l, L, N, H, K, R,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q rp^T [G, L, R] in float32, of rp float32 [H, R, K]. Grid: G N chunks x blocks of rows of rp."""
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    tokens = tl.arange(0, T)
    valid = chunk * T + tokens < L
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    q_ptr += batch * q_stride_b + head * q_stride_h + start * q_stride_l
    scores = tl.zeros((T, BLOCK_R), tl.float32)
    for first in range(0, K, BLOCK_D):
        inputs = first + tl.arange(0, BLOCK_D)
        q = load_tile(q_ptr, tokens, inputs, q_stride_l, valid, K)
        rp = load_projections(rp_ptr + head * R * K, inputs, columns, K, R)
        scores = parts_product(q, rp, scores, PRECISION)
    store_tile(positions_ptr + (group * L + start) * R, R, tokens, valid, columns, R, scores)


@triton.jit
def row_sums_kernel(
    y_ptr, weight_ptr, sums_ptr, y_stride_b, y_stride_h, y_stride_l, L, N, H, V,
    T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sum of weight_t y_t over each chunk, [G, N, V]. Grid: G N chunks x blocks of values."""
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    tokens = tl.arange(0, T)
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    y_ptr += batch * y_stride_b + head * y_stride_h + start * y_stride_l
    y = load_tile(y_ptr, tokens, values, y_stride_l, chunk * T + tokens < L, V).to(tl.float32)
    weight = tl.load(weight_ptr + (group * N + chunk) * T + tokens)
    tl.store(sums_ptr + (group * N + chunk) * V + values, tl.sum(y * weight[:, None], axis=0), mask=values < V)


@triton.jit
def window_scores(
    positions_ptr, rows, queries, valid, keys, there, R, reach, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The position score of each key for each query, [queries, keys]; 0 where it is not seen.

    The pointer stands at the first of these queries.
    """
    distance = keys[None, :] - queries[:, None]
    seen = valid[:, None] & there[None, :]
    if CAUSAL:
        seen = seen & (distance <= 0)
    row = tl.minimum(tl.maximum(distance, -reach), reach) + reach
    return tl.load(positions_ptr + rows[:, None] * R + row, mask=seen, other=0.0)


@triton.jit
def _kernel_part(
    q_ptr, q_stride, k_ptr, k_stride, rows, valid, state_ptr, z_ptr, values, K, V,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """q k^T of a chunk where keys are not after queries (0 unless CAUSAL), q S [T, BLOCK_V] and q z [T]."""
    scores = tl.zeros((T, T), tl.float32)
    num = tl.zeros((T, BLOCK_V), tl.float32)
    den = tl.zeros((T,), tl.float32)
    for d in range(0, K, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        q = operand(load_tile(q_ptr, rows, columns, q_stride, valid, K), PRECISION)
        if CAUSAL:
            k = operand(load_tile(k_ptr, rows, columns, k_stride, valid, K), PRECISION)
            scores = product(q, tl.trans(k), scores, PRECISION)
        there = (columns[:, None] < K) & (values[None, :] < V)
        state = tl.load(state_ptr + columns[:, None] * V + values[None, :], mask=there, other=0.0)
        num = product(q, operand(state, PRECISION), num, PRECISION)
        z = tl.load(z_ptr + columns, mask=columns < K, other=0.0)
        den += tl.sum(q.to(tl.float32) * z[None, :], axis=1)
    return tl.where(rows[:, None] >= rows[None, :], scores, 0.0), num, den


@triton.jit
def _far_part(
    positions_ptr, row, rows, valid, sums_ptr, values, V, R, num, den,
):  # fmt: skip
    """Add what all keys of chunks beyond the windows are to each query, [T, BLOCK_V] and [T]."""
    weight = tl.load(positions_ptr + rows * R + row, mask=valid, other=0.0)
    sums = tl.load(sums_ptr + values, mask=values < V, other=0.0)
    return num + weight[:, None] * sums[None, :], den + weight * tl.load(sums_ptr + V)


@triton.jit
def relative_outputs_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, ones_ptr, state_ptr, zm_ptr, earlier_ptr, later_ptr, out_ptr, denominator_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l, out_stride_b, out_stride_h, out_stride_l,
    L, S, N, NK, H, K, V, R, reach, blocks,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs [G, L, V] and denominators [G, L] of one chunk; windows reach into `blocks` chunks on a side.

    Causal, the state is that before each chunk, and L = S; else the one of all keys. `ones` [G, NK T] are 1 for keys
    that count. Sums [G, NK + 1, V + 1] are those of values and keys before chunk n and from chunk n on. A query without
    weight on any key has the output 0. Grid: G N chunks x blocks of values.
    """
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    positions_ptr += (group * L + start) * R
    out_ptr += batch * out_stride_b + head * out_stride_h + start * out_stride_l
    state = group
    if CAUSAL:
        state = group * N + chunk
    scores, num, den = _kernel_part(
        q_ptr + batch * q_stride_b + head * q_stride_h + start * q_stride_l, q_stride_l,
        k_ptr + batch * k_stride_b + head * k_stride_h + start * k_stride_l, k_stride_l, rows, valid,
        state_ptr + state * K * V, zm_ptr + state * (K + 1), values, K, V, CAUSAL, PRECISION, T, BLOCK_D, BLOCK_V,
    )  # fmt: skip

    last = chunk + 1
    if not CAUSAL:
        last = chunk + blocks + 1
    v_ptr += batch * v_stride_b + head * v_stride_h + (start - blocks * T) * v_stride_l
    ones_ptr += group * NK * T
    for block in range(chunk - blocks, last):
        keys = block * T + rows
        there = (keys >= 0) & (keys < S)
        weights = window_scores(positions_ptr, rows, tokens, valid, keys, there, R, reach, CAUSAL)
        weights += tl.where(block == chunk, scores, 0.0)
        den += tl.sum(weights * tl.load(ones_ptr + keys, mask=there, other=0.0)[None, :], axis=1)
        v = operand(load_tile(v_ptr, rows, values, v_stride_l, there, V), PRECISION)
        high = operand(weights, PRECISION)
        num = product(high, v, num, PRECISION)
        if PRECISION != "ieee":
            # In two parts: gradients of position scores are sums that nearly cancel, with outputs among them.
            num = product(operand(weights - high.to(tl.float32), PRECISION), v, num, PRECISION)
        v_ptr += T * v_stride_l

    before = tl.minimum(tl.maximum(chunk - blocks, 0), NK)
    earlier_ptr += (group * (NK + 1) + before) * (V + 1)
    num, den = _far_part(positions_ptr, 0, rows, valid, earlier_ptr, values, V, R, num, den)
    if not CAUSAL:
        after = tl.minimum(chunk + blocks + 1, NK)
        later_ptr += (group * (NK + 1) + after) * (V + 1)
        num, den = _far_part(positions_ptr, 2 * reach, rows, valid, later_ptr, values, V, R, num, den)
    nothing = den == 0.0
    out = tl.where(nothing[:, None], 0.0, num / tl.where(nothing, 1.0, den)[:, None])
    store_tile(out_ptr, out_stride_l, rows, valid, values, V, out)
    if tl.program_id(1) == 0:
        tl.store(denominator_ptr + group * L + tokens, den, mask=valid)

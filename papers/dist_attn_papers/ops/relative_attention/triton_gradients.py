"""Kernels of relative attention's backward pass: gradients of position scores, of queries and keys, and of values.

With r_t one over the denominator of query t and d_t = -r_t dO_t.o_t the gradient of it, the gradient of the score of
key i at query t is E_ti = r_t dO_t.v_i + d_t. Sums over keys or queries of chunks beyond the windows go through
states and through sums of values, as in the forward pass.

Shape letters: B batch, H heads, G = B H, L queries in N chunks, S keys in NK chunks, T tokens of a chunk, K features,
V values, R rows of relative positions.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import load_tile, operand, product, store_tile
from dist_attn.ops.linear_attention.triton_gradients import pair_products, through_states
from dist_attn_papers.ops.relative_attention.triton_outputs import window_scores


@triton.jit
def row_products_kernel(
    a_ptr, b_ptr, out_ptr,
    a_stride_b, a_stride_h, a_stride_l, b_stride_b, b_stride_h, b_stride_l,
    L, blocks, H, V, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """a_t . b_t in float32, [G, L]. Grid: G x blocks of T tokens."""
    program = tl.program_id(0)
    group, block = (program // blocks).to(tl.int64), program % blocks
    batch, head = group // H, group % H
    rows = tl.arange(0, T)
    tokens = block * T + rows
    valid = tokens < L
    start = block.to(tl.int64) * T
    a_ptr += batch * a_stride_b + head * a_stride_h + start * a_stride_l
    b_ptr += batch * b_stride_b + head * b_stride_h + start * b_stride_l
    total = tl.zeros((T,), tl.float32)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        a = load_tile(a_ptr, rows, values, a_stride_l, valid, V)
        b = load_tile(b_ptr, rows, values, b_stride_l, valid, V)
        total += tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    tl.store(out_ptr + group * L + tokens, total, mask=valid)


@triton.jit
def _far_gradient(
    y_ptr, stride, rows, valid, inverse, grad_den, sums_ptr, V, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sum of E_t over all keys of which `sums` are the values and the count, [T]."""
    total = grad_den * tl.load(sums_ptr + V)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        y = load_tile(y_ptr, rows, values, stride, valid, V).to(tl.float32)
        sums = tl.load(sums_ptr + values, mask=values < V, other=0.0)
        total += inverse * tl.sum(y * sums[None, :], axis=1)
    return total


@triton.jit
def positions_gradient_kernel(
    v_ptr, grad_out_ptr, inverse_ptr, grad_den_ptr, ones_ptr, earlier_ptr, later_ptr, scores_ptr,
    v_stride_b, v_stride_h, v_stride_l, y_stride_b, y_stride_h, y_stride_l,
    L, S, N, NK, H, V, R, reach, blocks,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient of position scores [G, L, R] of one chunk: each key of a window into its own place, askew.

    The outermost rows take the sums over all keys beyond. Grid: G N chunks.
    """
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    y_ptr = grad_out_ptr + batch * y_stride_b + head * y_stride_h + start * y_stride_l
    v_ptr += batch * v_stride_b + head * v_stride_h + (start - blocks * T) * v_stride_l
    scores_ptr += (group * L + start) * R
    ones_ptr += group * NK * T
    inverse = tl.load(inverse_ptr + group * N * T + tokens)
    grad_den = tl.load(grad_den_ptr + group * N * T + tokens)
    earliest = tl.zeros((T,), tl.float32)
    latest = tl.zeros((T,), tl.float32)
    last = chunk + 1
    if not CAUSAL:
        last = chunk + blocks + 1
    for block in range(chunk - blocks, last):
        keys = block * T + rows
        there = (keys >= 0) & (keys < S)
        ones = tl.load(ones_ptr + keys, mask=there, other=0.0)
        toward = pair_products(
            y_ptr, y_stride_l, valid, v_ptr, v_stride_l, there, rows, V, PRECISION, T, BLOCK_V
        )  # fmt: skip
        toward = toward * inverse[:, None] + grad_den[:, None] * ones[None, :]
        distance = keys[None, :] - tokens[:, None]
        within = (distance > -reach) & (distance < reach)
        if CAUSAL:
            within = (distance > -reach) & (distance <= 0)
        earliest += tl.sum(tl.where(distance <= -reach, toward, 0.0), axis=1)
        if not CAUSAL:
            latest += tl.sum(tl.where((distance >= reach) & (distance > -reach), toward, 0.0), axis=1)
        # Also 0 for keys that are not there: every row of every query is written.
        at = scores_ptr + rows[:, None] * R + distance + reach
        tl.store(at, toward, mask=valid[:, None] & within)
        v_ptr += T * v_stride_l

    before = tl.minimum(tl.maximum(chunk - blocks, 0), NK)
    earlier_ptr += (group * (NK + 1) + before) * (V + 1)
    earliest += _far_gradient(y_ptr, y_stride_l, rows, valid, inverse, grad_den, earlier_ptr, V, T, BLOCK_V)
    if not CAUSAL:
        after = tl.minimum(chunk + blocks + 1, NK)
        later_ptr += (group * (NK + 1) + after) * (V + 1)
        latest += _far_gradient(y_ptr, y_stride_l, rows, valid, inverse, grad_den, later_ptr, V, T, BLOCK_V)
        tl.store(scores_ptr + rows * R + 2 * reach, latest, mask=valid & (reach > 0))
        earliest += tl.where(reach == 0, latest, 0.0)
    tl.store(scores_ptr + rows * R, earliest, mask=valid)


@triton.jit
def relative_features_gradient_kernel(
    own_ptr, other_ptr, own_y_ptr, other_y_ptr, inverse_ptr, grad_den_ptr, state_ptr, zm_ptr, positions_ptr, rp_ptr,
    grad_ptr,
    own_stride_b, own_stride_h, own_stride_l, other_stride_b, other_stride_h, other_stride_l,
    own_y_stride_b, own_y_stride_h, own_y_stride_l, other_y_stride_b, other_y_stride_h, other_y_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l, L, N, H, K, V, R,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dq of one chunk, or dk for `KEYS`, where own and other change places. Own y is dO for queries and v for keys.

    `positions` is the gradient of position scores; it is of queries alone. L and N are those of own, and causal those
    of the other too. Grid: G N chunks.
    """
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    own_ptr += batch * own_stride_b + head * own_stride_h + start * own_stride_l
    other_ptr += batch * other_stride_b + head * other_stride_h + start * other_stride_l
    own_y_ptr += batch * own_y_stride_b + head * own_y_stride_h + start * own_y_stride_l
    other_y_ptr += batch * other_y_stride_b + head * other_y_stride_h + start * other_y_stride_l
    grad_ptr += batch * grad_stride_b + head * grad_stride_h + start * grad_stride_l
    positions_ptr += (group * L + start) * R
    rp_ptr += head * R * K
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    state = group * N + chunk if CAUSAL else group
    state_ptr += state * K * V
    zm_ptr += state * (K + 1)
    weight = valid.to(tl.float32)
    z_weight = weight
    if CAUSAL or not KEYS:
        inverse = tl.load(inverse_ptr + group * N * T + tokens)
        grad_den = tl.load(grad_den_ptr + group * N * T + tokens)
    if not KEYS:
        weight = inverse
        z_weight = grad_den
    if CAUSAL:
        entering = pair_products(
            own_y_ptr, own_y_stride_l, valid, other_y_ptr, other_y_stride_l, valid, rows, V, PRECISION, T, BLOCK_V
        )  # fmt: skip
        if KEYS:
            entering = entering * inverse[None, :] + grad_den[None, :]
            entering = tl.where(rows[:, None] <= rows[None, :], entering, 0.0)
        else:
            entering = entering * inverse[:, None] + grad_den[:, None]
            entering = tl.where(rows[:, None] >= rows[None, :], entering, 0.0)
    for d in range(0, K, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        grad = through_states(
            own_y_ptr, own_y_stride_l, rows, valid, weight, z_weight, state_ptr, zm_ptr, columns, K, V,
            PRECISION, T, BLOCK_D, BLOCK_V,
        )  # fmt: skip
        if CAUSAL:
            other = operand(load_tile(other_ptr, rows, columns, other_stride_l, valid, K), PRECISION)
            grad = product(operand(entering, PRECISION), other, grad, PRECISION)
        if not KEYS:
            for first in range(0, R, BLOCK_R):
                relative = first + tl.arange(0, BLOCK_R)
                scores = operand(load_tile(positions_ptr, rows, relative, R, valid, R), PRECISION)
                rp = operand(load_tile(rp_ptr, relative, columns, K, relative < R, K), PRECISION)
                grad = product(scores, rp, grad, PRECISION)
        store_tile(grad_ptr, grad_stride_l, rows, valid, columns, K, grad)


@triton.jit
def relative_values_gradient_kernel(
    q_ptr, k_ptr, grad_out_ptr, positions_ptr, inverse_ptr, state_ptr, earlier_ptr, later_ptr, grad_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l,
    y_stride_b, y_stride_h, y_stride_l, grad_stride_b, grad_stride_h, grad_stride_l,
    L, S, N, NK, H, K, V, R, reach, blocks,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dv of one chunk of keys: from its queries, those whose windows reach it, and all others by states and sums.

    Sums [G, N + 1, V] are those of r_t w_t dO_t, w the outermost position scores, of queries before chunk n (by the row
    of keys after them) and from chunk n on. Grid: G NK chunks x blocks of values.
    """
    program = tl.program_id(0)
    group, chunk = (program // NK).to(tl.int64), program % NK
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    rows = tl.arange(0, T)
    keys = chunk * T + rows
    there = keys < S
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    grad_ptr += batch * grad_stride_b + head * grad_stride_h + start * grad_stride_l
    q_ptr += batch * q_stride_b + head * q_stride_h + start * q_stride_l
    k_ptr += batch * k_stride_b + head * k_stride_h + start * k_stride_l
    state_ptr += group * K * V
    if CAUSAL:
        state_ptr += (group * (NK - 1) + chunk) * K * V
    scores = tl.zeros((T, T), tl.float32)
    grad = tl.zeros((T, BLOCK_V), tl.float32)
    for d in range(0, K, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        k = operand(load_tile(k_ptr, rows, columns, k_stride_l, there, K), PRECISION)
        if CAUSAL:
            q = operand(load_tile(q_ptr, rows, columns, q_stride_l, keys < L, K), PRECISION)
            scores = product(q, tl.trans(k), scores, PRECISION)
        inside = (columns[:, None] < K) & (values[None, :] < V)
        state = tl.load(state_ptr + columns[:, None] * V + values[None, :], mask=inside, other=0.0)
        grad = product(k, operand(state, PRECISION), grad, PRECISION)
    scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0)

    first = chunk
    if not CAUSAL:
        first = chunk - blocks
    skipped = (first - chunk) * T
    y_ptr = grad_out_ptr + batch * y_stride_b + head * y_stride_h + (start + skipped) * y_stride_l
    positions_ptr += (group * L + start + skipped) * R
    inverse_ptr += group * N * T
    for block in range(first, chunk + blocks + 1):
        queries = block * T + rows
        valid = (queries >= 0) & (queries < L)
        weights = window_scores(positions_ptr, rows, queries, valid, keys, there, R, reach, CAUSAL)
        weights += tl.where(block == chunk, scores, 0.0)
        weights = weights * tl.load(inverse_ptr + queries, mask=valid, other=0.0)[:, None]
        y = operand(load_tile(y_ptr, rows, values, y_stride_l, valid, V), PRECISION)
        grad = product(operand(tl.trans(weights), PRECISION), y, grad, PRECISION)
        y_ptr += T * y_stride_l
        positions_ptr += T * R

    after = tl.minimum(chunk + blocks + 1, N)
    far = tl.load(later_ptr + (group * (N + 1) + after) * V + values, mask=values < V, other=0.0)
    if not CAUSAL:
        before = tl.minimum(tl.maximum(chunk - blocks, 0), N)
        far += tl.load(earlier_ptr + (group * (N + 1) + before) * V + values, mask=values < V, other=0.0)
    store_tile(grad_ptr, grad_stride_l, rows, there, values, V, grad + far[None, :])

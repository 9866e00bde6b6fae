"""Kernels of outputs: a chunk of queries reads its own keys and the state before it, or one state, and divides once.

The read-out of one state serves the backward pass of sums too: the gradient of values is one.

Shape letters: B batch, H heads, G = B H, L tokens, N chunks of T tokens, K head size, D projections, M features, V
values.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import (
    features,
    load_map,
    load_tile,
    load_vectors,
    map_of_head,
    narrow,
    operand,
    product,
    project,
    store_tile,
)


@triton.jit
def pair_weights(
    decay_ptr, documents_ptr, queries, keys, L,
    KEYS_FIRST: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The share left of each key at each query of a chunk, [queries, keys], or [keys, queries] for `KEYS_FIRST`.

    0 for keys after the query, of another document, or behind the end.
    """
    if KEYS_FIRST:
        q, k = queries[None, :], keys[:, None]
    else:
        q, k = queries[:, None], keys[None, :]
    seen = (q >= k) & (q < L)
    if HAS_DOCUMENTS:
        seen = seen & (tl.load(documents_ptr + q) == tl.load(documents_ptr + k))
    if HAS_GATE:
        # One exponent <= 0, masked before exp: exp(c_t) exp(-c_i) would overflow.
        difference = tl.load(decay_ptr + q) - tl.load(decay_ptr + k)
        return tl.exp(tl.where(seen, difference, float("-inf")))
    else:
        return seen.to(tl.float32)


@triton.jit
def guard(denominator, mass, eps, KIND: tl.constexpr):
    """See `Denominator.guard`."""
    if KIND == "exact":
        return denominator
    elif KIND == "clamp":
        return tl.maximum(denominator, eps, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "sign_clamp" or KIND == "abs_clamp":
        size = tl.maximum(tl.abs(denominator), eps, propagate_nan=tl.PropagateNan.ALL)
        return size if KIND == "abs_clamp" else tl.where(denominator < 0.0, -size, size)
    elif KIND == "one":
        return tl.zeros_like(denominator) + 1.0
    else:
        floored = mass
        if KIND == "floor":
            floored = tl.maximum(denominator, eps * mass, propagate_nan=tl.PropagateNan.ALL)
        return tl.where(floored == 0.0, 1.0, floored)


@triton.jit
def divided(num, divisor):
    """Rows by their divisors, also by those so small that one over them would be infinite."""
    scale = tl.where(tl.abs(divisor) < 1e-30, 1e30, 1.0)
    inverse = 1.0 / (divisor * scale)
    return num * scale[:, None] * inverse[:, None]


@triton.jit
def load_state(state_ptr, z_ptr, outputs, values, D, V):
    """Some rows of a state and of z."""
    at = state_ptr + outputs[:, None] * V + values[None, :]
    state = tl.load(at, mask=(outputs[:, None] < D) & (values[None, :] < V), other=0.0)
    return state, tl.load(z_ptr + outputs, mask=outputs < D, other=0.0)


@triton.jit
def read_state(phi, state, z, num, den, WITH_Z: tl.constexpr, PRECISION: tl.constexpr):
    """num + phi S, and with WITH_Z den + phi z, of some rows of both."""
    if WITH_Z:
        den += tl.sum(phi * z[None, :], axis=1)
    return product(operand(phi, PRECISION), operand(state, PRECISION), num, PRECISION), den


@triton.jit
def scores_and_reads(
    own_ptr, own_stride, other_ptr, other_stride, rows, valid, w_ptr, state_ptr, z_ptr, values,
    K, D, V,
    WITH_Z: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """phi(own) phi(other)^T [T, T], phi(own) S [T, BLOCK_V] and with WITH_Z phi(own) z [T] of one chunk.

    Features are those before their scale.
    """
    scores = tl.zeros((T, T), tl.float32)
    num = tl.zeros((T, BLOCK_V), tl.float32)
    den = tl.zeros((T,), tl.float32)
    own_x, own_inverse = load_vectors(own_ptr, own_stride, rows, valid, K, MAP, UNIT, T, BLOCK_X)
    other_x, other_inverse = load_vectors(other_ptr, other_stride, rows, valid, K, MAP, UNIT, T, BLOCK_X)
    for d in range(0, D, BLOCK_D):
        outputs = d + tl.arange(0, BLOCK_D)
        high, low = load_map(w_ptr, outputs, K, D, MAP, PRECISION, BLOCK_D, BLOCK_X)
        # Read before features are made, as nothing prefetches z.
        state, z = load_state(state_ptr, z_ptr, outputs, values, D, V)
        state_second, z_second = state, z
        if MAP == "gaussian":
            state_second, z_second = load_state(state_ptr + D * V, z_ptr + D, outputs, values, D, V)
        other = project(
            other_x, other_inverse, high, low, other_ptr, other_stride, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        # Narrowed before the own ones are made: in float32 both would be held in registers at a time.
        other, other_second = features(other, (outputs < D)[None, :], 1.0, MAP, PRECISION)
        other, other_second = tl.trans(narrow(other, PRECISION)), tl.trans(narrow(other_second, PRECISION))
        own = project(
            own_x, own_inverse, high, low, own_ptr, own_stride, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        own, own_second = features(own, True, 1.0, MAP, PRECISION)
        num, den = read_state(own, state, z, num, den, WITH_Z, PRECISION)
        scores = product(narrow(own, PRECISION), other, scores, PRECISION)
        if MAP == "gaussian":
            num, den = read_state(own_second, state_second, z_second, num, den, WITH_Z, PRECISION)
            scores = product(narrow(own_second, PRECISION), other_second, scores, PRECISION)
        if PRECISION == "bf16":
            # A copy: were this product still under way in the next round, all products would wait for each other.
            scores = tl.where(valid[:, None], scores, 0.0)
    return scores, num, den


@triton.jit
def outputs_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, decay_ptr, key_scale_ptr, read_ptr, documents_ptr, state_ptr, zm_ptr,
    out_ptr, denominator_ptr, mass_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l, out_stride_b, out_stride_h, out_stride_l,
    L, N, H, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, scale, eps,
    KIND: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Outputs [G, L, V], denominators before any policy [G, L] and masses [G, L] of one chunk.

    Grid: G N chunks x blocks of values.
    """
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    v_ptr += batch * v_stride_b + head * v_stride_h + start * v_stride_l
    out_ptr += batch * out_stride_b + head * out_stride_h + start * out_stride_l
    zm_ptr += (group * N + chunk) * (M + 1)
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)

    scores, num, den = scores_and_reads(
        q_ptr + batch * q_stride_b + head * q_stride_h + start * q_stride_l, q_stride_l,
        k_ptr + batch * k_stride_b + head * k_stride_h + start * k_stride_l, k_stride_l, rows, valid,
        map_of_head(w_ptr, head, K, D, PRECISION), state_ptr + (group * N + chunk) * M * V, zm_ptr, values,
        K, D, V, True, MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_V, BLOCK_X,
    )  # fmt: skip
    weights = pair_weights(decay_ptr + group * N * T, documents_ptr, tokens, tokens, L, False, HAS_GATE, HAS_DOCUMENTS)
    if HAS_SCALE:
        weights = weights * tl.load(key_scale_ptr + group * N * T + tokens)[None, :]
    read = tl.load(read_ptr + group * N * T + tokens)
    # Zeros of the scores: in a layout of its own the sum would have all weights made twice.
    mass = read * tl.load(zm_ptr + M) + tl.sum(weights + 0.0 * scores, axis=1)
    weights = weights * (scores * (scale * scale))
    read = read * scale
    den = read * den + tl.sum(weights, axis=1)
    v = operand(load_tile(v_ptr, rows, values, v_stride_l, valid, V), PRECISION)
    num = product(operand(weights, PRECISION), v, num * read[:, None], PRECISION)
    divisor = tl.where(valid, guard(den, mass, eps, KIND), 1.0)
    store_tile(out_ptr, out_stride_l, rows, valid, values, V, divided(num, divisor))
    if tl.program_id(1) == 0:
        tl.store(denominator_ptr + group * L + tokens, den, mask=valid)
        tl.store(mass_ptr + group * L + tokens, mass, mask=valid)


@triton.jit
def read_kernel(
    x_ptr, w_ptr, weight_ptr, state_ptr, zm_ptr, out_ptr, denominator_ptr,
    x_stride_b, x_stride_h, x_stride_l, out_stride_b, out_stride_h, out_stride_l,
    L, N, H, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, scale, eps,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
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
    w_ptr = map_of_head(w_ptr, head, K, D, PRECISION)
    x, inverse = load_vectors(x_ptr, x_stride_l, rows, valid, K, MAP, UNIT, T, BLOCK_X)
    for d in range(0, D, BLOCK_D):
        outputs = d + tl.arange(0, BLOCK_D)
        high, low = load_map(w_ptr, outputs, K, D, MAP, PRECISION, BLOCK_D, BLOCK_X)
        projected = project(
            x, inverse, high, low, x_ptr, x_stride_l, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        first, second = features(projected, True, scale, MAP, PRECISION)
        state, z = load_state(state_ptr, zm_ptr, outputs, values, D, V)
        num, den = read_state(first, state, z, num, den, True, PRECISION)
        if MAP == "gaussian":
            state, z = load_state(state_ptr + D * V, zm_ptr + D, outputs, values, D, V)
            num, den = read_state(second, state, z, num, den, True, PRECISION)
    if HAS_WEIGHT:
        num = num * tl.load(weight_ptr + group * N * T + tokens)[:, None]
    mass = tl.zeros((T,), tl.float32) + tl.load(zm_ptr + M)
    divisor = tl.where(valid, guard(den, mass, eps, KIND), 1.0)
    store_tile(out_ptr, out_stride_l, rows, valid, values, V, divided(num, divisor))
    if tl.program_id(1) == 0:
        tl.store(denominator_ptr + group * L + tokens, den, mask=valid)

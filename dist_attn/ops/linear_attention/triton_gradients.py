"""Kernels of the backward pass: gradients of queries and keys through the map, of values, and of the map's w.

With E_ti = (s_ti (r_t dO_t.v_i + d_t) + m_t) times what is left of key i at query t, where s are the scores, r_t is one
over the divisor, and d_t and m_t are the gradients of denominator and mass, the gradient of a key's scale is the sum of
its column, and that of a cumulative gate its row minus its column. Both are taken inside a chunk, where rounding
does not add up; from chunk to chunk they go through the states.

Shape letters: B batch, H heads, G = B H, L tokens, N chunks of T tokens, K head size, D projections, M features, V
values.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import (
    feature_tile,
    features,
    load_projections,
    load_tile,
    operand,
    product,
    project,
    projection_gradient,
    store_tile,
)
from dist_attn.ops.linear_attention.triton_outputs import pair_weights, scores_and_reads


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
def values_gradient_kernel(
    q_ptr, k_ptr, grad_out_ptr, w_ptr, decay_ptr, key_scale_ptr, left_ptr, inverse_ptr, documents_ptr,
    state_ptr, zm_ptr, grad_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l,
    y_stride_b, y_stride_h, y_stride_l, grad_stride_b, grad_stride_h, grad_stride_l,
    L, N, H, K, D, M, V, scale,
    HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dv of one chunk: from its own queries, and from all later ones by the adjoint state after it.

    Grid: G N chunks x blocks of values.
    """
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    grad_out_ptr += batch * y_stride_b + head * y_stride_h + start * y_stride_l
    grad_ptr += batch * grad_stride_b + head * grad_stride_h + start * grad_stride_l
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    scores, grad, _ = scores_and_reads(
        k_ptr + batch * k_stride_b + head * k_stride_h + start * k_stride_l, k_stride_l,
        q_ptr + batch * q_stride_b + head * q_stride_h + start * q_stride_l, q_stride_l, rows, valid,
        w_ptr + head * D * K, state_ptr + (group * N + chunk) * M * V, zm_ptr + (group * N + chunk) * (M + 1),
        values, K, D, V, scale,
        MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    weights = pair_weights(decay_ptr + group * N * T, documents_ptr, tokens, tokens, L, True, HAS_GATE, HAS_DOCUMENTS)
    inverse = tl.load(inverse_ptr + group * N * T + tokens)
    weights = operand(scores * weights * inverse[None, :], PRECISION)
    left = tl.load(left_ptr + group * N * T + tokens)
    grad_out = operand(load_tile(grad_out_ptr, rows, values, y_stride_l, valid, V), PRECISION)
    grad = product(weights, grad_out, grad * left[:, None], PRECISION)
    if HAS_SCALE:
        grad = grad * tl.load(key_scale_ptr + group * N * T + tokens)[:, None]
    store_tile(grad_ptr, grad_stride_l, rows, valid, values, V, grad)


@triton.jit
def pair_products(
    a_ptr, a_stride, a_valid, b_ptr, b_stride, b_valid, rows, V,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """a b^T, [T, T]."""
    total = tl.zeros((T, T), tl.float32)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        a = operand(load_tile(a_ptr, rows, values, a_stride, a_valid, V), PRECISION)
        b = operand(load_tile(b_ptr, rows, values, b_stride, b_valid, V), PRECISION)
        total = product(a, tl.trans(b), total, PRECISION)
    return total


@triton.jit
def through_states(
    y_ptr, stride, rows, valid, weight, z_weight, state_ptr, z_ptr, outputs, D, V,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """weight y S^T + z_weight z, [T, BLOCK_D]: the gradient of features that meet a state."""
    z = tl.load(z_ptr + outputs, mask=outputs < D, other=0.0)
    total = z_weight[:, None] * z[None, :]
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        y = load_tile(y_ptr, rows, values, stride, valid, V).to(tl.float32)
        there = (outputs[None, :] < D) & (values[:, None] < V)
        state = tl.load(state_ptr + outputs[None, :] * V + values[:, None], mask=there, other=0.0)
        total = product(operand(y * weight[:, None], PRECISION), operand(state, PRECISION), total, PRECISION)
    return total


@triton.jit
def _towards(
    own_ptr, own_stride, other_ptr, other_stride, decay_ptr, key_scale_ptr, inverse_ptr, grad_den_ptr, grad_mass_ptr,
    documents_ptr, rows, tokens, valid, L, V,
    KEYS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """E without its scores and masses, [own, other], and the row sums of its masses; of keys before their scale."""
    pairs = pair_weights(decay_ptr, documents_ptr, tokens, tokens, L, KEYS, HAS_GATE, HAS_DOCUMENTS)
    if HAS_SCALE and not KEYS:
        pairs = pairs * tl.load(key_scale_ptr + tokens)[None, :]
    inverse, grad_den = tl.load(inverse_ptr + tokens), tl.load(grad_den_ptr + tokens)
    grad_mass = tl.load(grad_mass_ptr + tokens)
    toward = pair_products(
        own_ptr, own_stride, valid, other_ptr, other_stride, valid, rows, V, PRECISION, T, BLOCK_V
    )  # fmt: skip
    if KEYS:
        toward = toward * inverse[None, :] + grad_den[None, :]
        masses = tl.sum(pairs * grad_mass[None, :], axis=1)
    else:
        toward = toward * inverse[:, None] + grad_den[:, None]
        masses = tl.sum(pairs, axis=1) * grad_mass
    return toward * pairs, masses


@triton.jit
def _part_gradient(
    phi, other_phi, entering, y_ptr, stride, rows, valid, weight, z_weight, state_ptr, z_ptr, outputs, D, V,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient of one part of phi, and its products with phi: of what came through the state, and of all.

    The products are the row sums of E, without scores being made for them.
    """
    through = through_states(
        y_ptr, stride, rows, valid, weight, z_weight, state_ptr, z_ptr, outputs, D, V, PRECISION, T, BLOCK_D, BLOCK_V
    )  # fmt: skip
    state_rows = tl.sum(phi * through, axis=1)
    total = through
    if PAIRS:
        total = product(entering, operand(other_phi, PRECISION), through, PRECISION)
    return total, state_rows, tl.sum(phi * total, axis=1)


@triton.jit
def _projections_gradient(
    own_ptr, own_stride, other_ptr, other_stride, y_ptr, y_stride, w_ptr, state_ptr, z_ptr,
    entering, weight, z_weight, rows, valid, outputs, K, D, V, scale,
    PAIRS: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient of w x / |x| and 1 / |x|; both sums of `_part_gradient`."""
    other = entering
    other_second = entering
    if PAIRS:
        other, other_second = feature_tile(
            other_ptr, other_stride, rows, valid, w_ptr, outputs, K, D, scale,
            MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_K,
        )  # fmt: skip
    projected, lengths = project(
        own_ptr, own_stride, rows, valid, w_ptr, outputs, K, D, MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_K
    )  # fmt: skip
    first, second = features(projected, outputs, D, scale, MAP)
    grad_first, through, products = _part_gradient(
        first, other, entering, y_ptr, y_stride, rows, valid, weight, z_weight, state_ptr, z_ptr,
        outputs, D, V, PAIRS, PRECISION, T, BLOCK_D, BLOCK_V,
    )  # fmt: skip
    grad_second = grad_first
    if MAP == "gaussian":
        grad_second, through_second, products_second = _part_gradient(
            second, other_second, entering, y_ptr, y_stride, rows, valid, weight, z_weight, state_ptr + D * V,
            z_ptr + D, outputs, D, V, PAIRS, PRECISION, T, BLOCK_D, BLOCK_V,
        )  # fmt: skip
        through += through_second
        products += products_second
    grad_projected = projection_gradient(projected, grad_first, grad_second, first, second, scale, MAP)
    return tl.where((outputs < D)[None, :], grad_projected, 0.0), lengths, through, products


@triton.jit
def _walk_projections(
    own_ptr, own_stride, other_ptr, other_stride, y_ptr, y_stride, w_ptr, state_ptr, z_ptr, grad_ptr, grad_stride,
    projected_ptr, entering, own_scale, weight, z_weight, rows, valid, K, D, V, scale,
    PAIRS: tl.constexpr, WITH_PROJECTED: tl.constexpr, BLOCK_X: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the gradient of own and, where asked for, those of its projections over |x|; sums of `_part_gradient`."""
    columns = tl.arange(0, BLOCK_X)
    lengths = tl.full((T,), 1.0, tl.float32)
    state_rows, chunk_rows = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)
    grad = tl.zeros((T, BLOCK_X), tl.float32)
    for d in range(0, D, BLOCK_D):
        outputs = d + tl.arange(0, BLOCK_D)
        grad_projected, lengths, through, products = _projections_gradient(
            own_ptr, own_stride, other_ptr, other_stride, y_ptr, y_stride, w_ptr, state_ptr, z_ptr,
            entering, weight, z_weight, rows, valid, outputs, K, D, V, scale,
            PAIRS, MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        state_rows += through
        chunk_rows += products
        grad_projected = grad_projected * own_scale[:, None]
        if MAP == "none" or MAP == "elu":
            store_tile(grad_ptr, grad_stride, rows, valid, outputs, D, grad_projected)
        else:
            w = tl.trans(load_projections(w_ptr, columns, outputs, K, D))
            grad = product(operand(grad_projected, PRECISION), operand(w, PRECISION), grad, PRECISION)
            if WITH_PROJECTED:
                store_tile(projected_ptr, D, rows, valid, outputs, D, grad_projected * lengths[:, None])
    if MAP == "gaussian" or MAP == "arc_cosine":
        if UNIT:
            direction = load_tile(own_ptr, rows, columns, own_stride, valid, K).to(tl.float32) * lengths[:, None]
            grad = (grad - direction * tl.sum(direction * grad, axis=1)[:, None]) * lengths[:, None]
        store_tile(grad_ptr, grad_stride, rows, valid, columns, K, grad)
    return state_rows, chunk_rows


@triton.jit
def features_gradient_kernel(
    own_ptr, other_ptr, own_y_ptr, other_y_ptr, w_ptr, decay_ptr, key_scale_ptr, documents_ptr,
    inverse_ptr, grad_den_ptr, grad_mass_ptr, weight_ptr, z_weight_ptr, mass_weight_ptr, state_ptr, zm_ptr,
    grad_ptr, projected_ptr, rows_ptr, state_rows_ptr,
    own_stride_b, own_stride_h, own_stride_l, other_stride_b, other_stride_h, other_stride_l,
    own_y_stride_b, own_y_stride_h, own_y_stride_l, other_y_stride_b, other_y_stride_h, other_y_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l, L, N, H, K, D, M, V, scale,
    KEYS: tl.constexpr, PAIRS: tl.constexpr, WITH_ROWS: tl.constexpr, WITH_PROJECTED: tl.constexpr,
    BLOCK_X: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq of one chunk, or dk for `KEYS`, where own and other change places; sums of E over the other; see above.

    Without `PAIRS` all that a token sees went through one state, [G, M, V] and [G, M + 1], and `other` is not read.

    Own y is dO for queries and v for keys. Rows of keys are those before their scale. Where they are asked for, the
    gradients of the projections, divided by |x|, are kept for that of w. Grid: G N chunks.
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
    state = group
    if PAIRS:
        state = group * N + chunk
    zm_ptr += state * (M + 1)
    rows = tl.arange(0, T)
    tokens = chunk * T + rows
    valid = tokens < L
    of_group = group * N * T
    at = of_group + tokens
    entering = tl.zeros((T, T), tl.float32)
    masses = tl.zeros((T,), tl.float32)
    if PAIRS:
        entering, masses = _towards(
            own_y_ptr, own_y_stride_l, other_y_ptr, other_y_stride_l, decay_ptr + of_group, key_scale_ptr + of_group,
            inverse_ptr + of_group, grad_den_ptr + of_group, grad_mass_ptr + of_group, documents_ptr,
            rows, tokens, valid, L, V, KEYS, HAS_GATE, HAS_SCALE, HAS_DOCUMENTS, PRECISION, T, BLOCK_V,
        )  # fmt: skip
    own_scale = tl.full((T,), 1.0, tl.float32)
    if HAS_SCALE and KEYS:
        own_scale = tl.load(key_scale_ptr + at)
    state_rows, chunk_rows = _walk_projections(
        own_ptr, own_stride_l, other_ptr, other_stride_l, own_y_ptr, own_y_stride_l, w_ptr + head * D * K,
        state_ptr + state * M * V, zm_ptr, grad_ptr, grad_stride_l,
        projected_ptr + (group * L + start) * D, operand(entering, PRECISION), own_scale,
        tl.load(weight_ptr + at), tl.load(z_weight_ptr + at), rows, valid, K, D, V, scale,
        PAIRS, WITH_PROJECTED, BLOCK_X, MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    if WITH_ROWS:
        mass_rows = tl.load(mass_weight_ptr + at) * tl.load(zm_ptr + M)
        tl.store(rows_ptr + at, chunk_rows + masses + mass_rows)
        tl.store(state_rows_ptr + at, state_rows + mass_rows)


@triton.jit
def map_gradient_kernel(
    projected_ptr, x_ptr, grad_ptr, x_stride_b, x_stride_h, x_stride_l, L, N, H, K, D, splits,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw of every splits-th chunk, [G, splits, D, K]: sum of the gradients of projections times x.

    Grid: G splits x blocks of projections x blocks of inputs.
    """
    program = tl.program_id(0)
    group, split = (program // splits).to(tl.int64), program % splits
    x_ptr += (group // H) * x_stride_b + (group % H) * x_stride_h
    outputs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inputs = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = tl.arange(0, T)
    total = tl.zeros((BLOCK_D, BLOCK_K), tl.float32)
    start = split.to(tl.int64) * T
    for _ in range(split, N, splits):
        valid = start + rows < L
        grad = operand(load_tile(projected_ptr + (group * L + start) * D, rows, outputs, D, valid, D), PRECISION)
        x = operand(load_tile(x_ptr + start * x_stride_l, rows, inputs, x_stride_l, valid, K), PRECISION)
        total = product(tl.trans(grad), x, total, PRECISION)
        start += splits * T
    at = grad_ptr + ((group * splits + split) * D + outputs[:, None]) * K + inputs[None, :]
    tl.store(at, total, mask=(outputs[:, None] < D) & (inputs[None, :] < K))

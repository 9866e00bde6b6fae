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
    features,
    inputs_product,
    load_map,
    load_tile,
    load_vectors,
    map_of_head,
    operand,
    product,
    project,
    projection_gradient,
    store_tile,
)
from dist_attn.ops.linear_attention.triton_outputs import pair_weights, scores_and_reads


@triton.jit
def values_gradient_kernel(
    q_ptr, k_ptr, grad_out_ptr, w_ptr, decay_ptr, key_scale_ptr, left_ptr, inverse_ptr, documents_ptr,
    state_ptr, zm_ptr, grad_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l,
    y_stride_b, y_stride_h, y_stride_l, grad_stride_b, grad_stride_h, grad_stride_l,
    L, N, H, K, D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, scale,
    HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
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
        map_of_head(w_ptr, head, K, D, PRECISION), state_ptr + (group * N + chunk) * M * V,
        zm_ptr + (group * N + chunk) * (M + 1), values, K, D, V,
        False, MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_V, BLOCK_X,
    )  # fmt: skip
    weights = pair_weights(decay_ptr + group * N * T, documents_ptr, tokens, tokens, L, True, HAS_GATE, HAS_DOCUMENTS)
    inverse = tl.load(inverse_ptr + group * N * T + tokens) * (scale * scale)
    weights = operand(scores * weights * inverse[None, :], PRECISION)
    left = tl.load(left_ptr + group * N * T + tokens) * scale
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
        a = load_tile(a_ptr, rows, values, a_stride, a_valid, V)
        b = load_tile(b_ptr, rows, values, b_stride, b_valid, V)
        total = inputs_product(a, tl.trans(b), total, PRECISION)
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
def through_state(
    y, y_ptr, y_stride, rows, valid, weight, z_weight, state_ptr, z_ptr, outputs, values, D, V,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """weight y S^T + z_weight z, [T, BLOCK_D], of all values: the gradient of features that meet a state.

    Weights come after the product: y stays as it is in memory, and is not held in registers too.
    """
    if PRECISION == "ieee":
        # See `project`.
        return through_states(
            y_ptr, y_stride, rows, valid, weight, z_weight, state_ptr, z_ptr, outputs, D, V, PRECISION, T, BLOCK_D, 32
        )  # fmt: skip
    else:
        z = tl.load(z_ptr + outputs, mask=outputs < D, other=0.0)
        there = (outputs[None, :] < D) & (values[:, None] < V)
        state = tl.load(state_ptr + outputs[None, :] * V + values[:, None], mask=there, other=0.0)
        total = tl.zeros((T, BLOCK_D), tl.float32)
        total = product(operand(y, PRECISION), operand(state, PRECISION), total, PRECISION)
        return total * weight[:, None] + z_weight[:, None] * z[None, :]


@triton.jit
def _towards(
    toward, decay_ptr, key_scale_ptr, inverse_ptr, grad_den_ptr, grad_mass_ptr, documents_ptr, tokens, L,
    KEYS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """E without its scores and masses, [own, other], and the row sums of its masses; of keys before their scale.

    From the products dO.v of all pairs.
    """
    pairs = pair_weights(decay_ptr, documents_ptr, tokens, tokens, L, KEYS, HAS_GATE, HAS_DOCUMENTS)
    if HAS_SCALE and not KEYS:
        pairs = pairs * tl.load(key_scale_ptr + tokens)[None, :]
    inverse, grad_den = tl.load(inverse_ptr + tokens), tl.load(grad_den_ptr + tokens)
    grad_mass = tl.load(grad_mass_ptr + tokens)
    if KEYS:
        toward = toward * inverse[None, :] + grad_den[None, :]
        masses = tl.sum(pairs * grad_mass[None, :], axis=1)
    else:
        toward = toward * inverse[:, None] + grad_den[:, None]
        masses = tl.sum(pairs, axis=1) * grad_mass
    return toward * pairs, masses


@triton.jit
def _part_gradient(
    phi, other_phi, entering, y, y_ptr, y_stride, rows, valid, weight, z_weight, state_ptr, z_ptr,
    outputs, values, D, V,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of one part of phi, and its products with phi: of what came through the state, and of all.

    The products are the row sums of E, without scores being made for them.
    """
    through = through_state(
        y, y_ptr, y_stride, rows, valid, weight, z_weight, state_ptr, z_ptr, outputs, values, D, V,
        PRECISION, T, BLOCK_D,
    )  # fmt: skip
    state_rows = tl.sum(phi * through, axis=1)
    total = through
    if PAIRS:
        if PRECISION == "ieee":
            total = product(entering, other_phi, through, PRECISION)
        else:
            # A copy: ptxas before CUDA 13.3 may read what a product of a Hopper GPU adds to after it was written.
            total = product(entering, other_phi, tl.where(valid[:, None], through, 0.0), PRECISION)
    return total, state_rows, tl.sum(phi * total, axis=1)


@triton.jit
def _walk_projections(
    own_ptr, own_stride, other_ptr, other_stride, w_ptr, state_ptr, z_ptr, grad_ptr, grad_stride,
    entering, y, y_ptr, y_stride, own_scale, weight, z_weight, rows, valid, values, K, D, V, scale,
    PAIRS: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Store the gradients of projections over |x|, or of own for maps without w; sums of `_part_gradient`.

    Features here are those before their scale, with which `entering` comes.
    """
    state_rows, chunk_rows = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)
    own_x, lengths = load_vectors(own_ptr, own_stride, rows, valid, K, MAP, UNIT, T, BLOCK_X)
    other_x, other_lengths = own_x, lengths
    if PAIRS:
        other_x, other_lengths = load_vectors(other_ptr, other_stride, rows, valid, K, MAP, UNIT, T, BLOCK_X)
    for d in range(0, D, BLOCK_D):
        outputs = d + tl.arange(0, BLOCK_D)
        high, low = load_map(w_ptr, outputs, K, D, MAP, PRECISION, BLOCK_D, BLOCK_X)
        other, other_second = entering, entering
        if PAIRS:
            other = project(
                other_x, other_lengths, high, low, other_ptr, other_stride, rows, valid, w_ptr, outputs, K, D,
                MAP, UNIT, PRECISION, T, BLOCK_D,
            )  # fmt: skip
            other, other_second = features(other, True, 1.0, MAP, PRECISION)
            other, other_second = operand(other, PRECISION), operand(other_second, PRECISION)
        projected = project(
            own_x, lengths, high, low, own_ptr, own_stride, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        first, second = features(projected, (outputs < D)[None, :], 1.0, MAP, PRECISION)
        grad_first, through, products = _part_gradient(
            first, other, entering, y, y_ptr, y_stride, rows, valid, weight, z_weight, state_ptr, z_ptr,
            outputs, values, D, V, PAIRS, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        grad_second = grad_first
        if MAP == "gaussian":
            grad_second, through_second, products_second = _part_gradient(
                second, other_second, entering, y, y_ptr, y_stride, rows, valid, weight, z_weight,
                state_ptr + D * V, z_ptr + D, outputs, values, D, V, PAIRS, PRECISION, T, BLOCK_D,
            )  # fmt: skip
            through += through_second
            products += products_second
        state_rows += through
        chunk_rows += products
        grad_projected = projection_gradient(projected, grad_first, grad_second, first, second, MAP)
        factor = own_scale * lengths * scale
        store_tile(grad_ptr, grad_stride, rows, valid, outputs, D, grad_projected * factor[:, None])
    return state_rows * scale, chunk_rows * scale


@triton.jit
def features_gradient_kernel(
    own_ptr, other_ptr, own_y_ptr, other_y_ptr, w_ptr, decay_ptr, key_scale_ptr, documents_ptr,
    inverse_ptr, grad_den_ptr, grad_mass_ptr, weight_ptr, z_weight_ptr, mass_weight_ptr, state_ptr, zm_ptr,
    grad_ptr, rows_ptr, state_rows_ptr,
    own_stride_b, own_stride_h, own_stride_l, other_stride_b, other_stride_h, other_stride_l,
    own_y_stride_b, own_y_stride_h, own_y_stride_l, other_y_stride_b, other_y_stride_h, other_y_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l, L, N, H, K, D: tl.constexpr, M: tl.constexpr,
    V, scale, KEYS: tl.constexpr, PAIRS: tl.constexpr, WITH_ROWS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's gradient of the projections of q over |q|; of k for `KEYS`, where own and other change places.

    For maps without w it is that of q or k itself. Sums of E over the other; see above. Without `PAIRS` all that a
    token sees went through one state, [G, M, V] and [G, M + 1], and `other` is not read.

    Own y is dO for queries and v for keys. Rows of keys are those before their scale. All values are one tile.
    Grid: G N chunks.
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
    values = tl.arange(0, BLOCK_V)
    y = load_tile(own_y_ptr, rows, values, own_y_stride_l, valid, V)
    entering, masses = tl.zeros((T, T), tl.float32), tl.zeros((T,), tl.float32)
    if PAIRS:
        if PRECISION == "ieee":  # K and V are no constants, or loops over them would spill registers
            entering = pair_products(
                own_y_ptr, own_y_stride_l, valid, other_y_ptr, other_y_stride_l, valid, rows, V, PRECISION, T, 32
            )  # fmt: skip
        else:
            other_y = load_tile(other_y_ptr, rows, values, other_y_stride_l, valid, V)
            entering = inputs_product(y, tl.trans(other_y), entering, PRECISION)
        entering, masses = _towards(
            entering, decay_ptr + of_group, key_scale_ptr + of_group, inverse_ptr + of_group,
            grad_den_ptr + of_group, grad_mass_ptr + of_group, documents_ptr, tokens, L,
            KEYS, HAS_GATE, HAS_SCALE, HAS_DOCUMENTS,
        )  # fmt: skip
    own_scale = tl.full((T,), 1.0, tl.float32)
    if HAS_SCALE and KEYS:
        own_scale = tl.load(key_scale_ptr + at)
    state_rows, chunk_rows = _walk_projections(
        own_ptr, own_stride_l, other_ptr, other_stride_l, map_of_head(w_ptr, head, K, D, PRECISION),
        state_ptr + state * M * V, zm_ptr, grad_ptr, grad_stride_l,
        operand(entering * scale, PRECISION), y, own_y_ptr, own_y_stride_l, own_scale,
        tl.load(weight_ptr + at), tl.load(z_weight_ptr + at), rows, valid, values, K, D, V, scale,
        PAIRS, MAP, UNIT, PRECISION, T, BLOCK_D, BLOCK_X,
    )  # fmt: skip
    if WITH_ROWS:
        mass_rows = tl.load(mass_weight_ptr + at) * tl.load(zm_ptr + M)
        tl.store(rows_ptr + at, chunk_rows + masses + mass_rows)
        tl.store(state_rows_ptr + at, state_rows + mass_rows)


@triton.jit
def inputs_gradient_kernel(
    projected_ptr, x_ptr, w_ptr, grad_ptr, x_stride_b, x_stride_h, x_stride_l,
    grad_stride_b, grad_stride_h, grad_stride_l, L, N, H, K, D,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """dx of one chunk from the gradients [G, L, D] of its projections over |x|. Grid: G N chunks."""
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    batch, head = group // H, group % H
    start = chunk.to(tl.int64) * T
    x_ptr += batch * x_stride_b + head * x_stride_h + start * x_stride_l
    grad_ptr += batch * grad_stride_b + head * grad_stride_h + start * grad_stride_l
    projected_ptr += (group * L + start) * D
    w_ptr = map_of_head(w_ptr, head, K, D, PRECISION)
    rows, inputs = tl.arange(0, T), tl.arange(0, BLOCK_X)
    valid = chunk * T + rows < L
    grad = tl.zeros((T, BLOCK_X), tl.float32)
    for d in range(0, D, BLOCK_D):
        outputs = d + tl.arange(0, BLOCK_D)
        projected = operand(load_tile(projected_ptr, rows, outputs, D, valid, D), PRECISION)
        w = operand(load_tile(w_ptr, outputs, inputs, K, outputs < D, K), PRECISION)
        grad = product(projected, w, grad, PRECISION)
    if UNIT:
        x, inverse = load_vectors(x_ptr, x_stride_l, rows, valid, K, "gaussian", True, T, BLOCK_X)
        direction = x.to(tl.float32) * inverse[:, None]
        grad = grad - direction * tl.sum(direction * grad, axis=1)[:, None]
    store_tile(grad_ptr, grad_stride_l, rows, valid, inputs, K, grad)


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

"""Kernels of what keys leave behind: cumulative gates, sums over chunks or over all of them, and a scan of the former.

Every tensor of one number a token is float32 [G, N T], G = B H, for N chunks of T tokens, the last filled up with
zeros. Sums over features are [G, N, M, V] beside [G, N, M + 1]: z, and the mass in the last column. The same kernels
serve the backward pass, where the sums are those of queries and the scan runs from the last chunk to the first.

Shape letters: B batch, H heads, L tokens, K head size, D projections, M features, V values, E elements of a state.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import (
    features,
    load_map,
    load_tile,
    load_vectors,
    map_of_head,
    operand,
    product,
    project,
)


@triton.jit
def gates_kernel(
    log_gate_ptr, documents_ptr, decay_ptr, left_ptr, read_ptr, gain_ptr, L, N,
    HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    CLOSED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Of one chunk: cumulative log gates, what of each key is left after it, what of the state before is left at each
    query, and what of that state is left after the chunk.

    Cumulative sums restart in every chunk and document. What a document's start cuts off is exactly 0.
    """
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    within = tl.arange(0, T)
    tokens = chunk * T + within
    valid = tokens < L
    # A closed gate, and all others whose exp is 0, are raised to where it is 0 just so: see `block.bounded`.
    gate = tl.zeros((T,), tl.float32)
    if HAS_GATE:
        gate = tl.load(log_gate_ptr + group * L + tokens, mask=valid, other=0.0).to(tl.float32)
        gate = tl.maximum(gate, CLOSED)
    before = within[:, None] >= within[None, :]
    left = valid.to(tl.float32)
    reads = tl.full((T,), 1.0, tl.float32)
    gain = 1.0
    if HAS_DOCUMENTS:
        number = tl.load(documents_ptr + tokens)
        number_before = tl.load(documents_ptr + chunk * T - 1, mask=chunk > 0, other=0)
        number_last = tl.load(documents_ptr + chunk * T + T - 1)
        before = before & (number[:, None] == number[None, :])
        left = tl.where(number == number_last, left, 0.0)
        reads = tl.where(number == number_before, 1.0, 0.0)
        gain = tl.where(number_before == number_last, 1.0, 0.0)
    if HAS_GATE:
        decay = tl.sum(tl.where(before, gate[None, :], 0.0), axis=1)
        last = tl.sum(tl.where(within == T - 1, decay, 0.0), axis=0)
        # Masked before exp: across documents the difference may be of any sign.
        left = left * tl.exp(tl.where(left != 0.0, last - decay, 0.0))
        reads = reads * tl.exp(decay)
        gain = gain * tl.exp(last)
        tl.store(decay_ptr + group * N * T + tokens, decay)
    tl.store(left_ptr + group * N * T + tokens, left)
    tl.store(read_ptr + group * N * T + tokens, reads)
    tl.store(gain_ptr + group * N + chunk, gain)


@triton.jit
def gate_gradients_kernel(
    log_gate_ptr, documents_ptr, grad_decay_ptr, grad_gate_ptr, L, N,
    HAS_DOCUMENTS: tl.constexpr, CLOSED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradient of log gates from that of their cumulative sums in one chunk."""
    program = tl.program_id(0)
    group, chunk = (program // N).to(tl.int64), program % N
    within = tl.arange(0, T)
    tokens = chunk * T + within
    after = within[:, None] <= within[None, :]
    if HAS_DOCUMENTS:
        number = tl.load(documents_ptr + tokens)
        after = after & (number[:, None] == number[None, :])
    grad_decay = tl.load(grad_decay_ptr + group * N * T + tokens)
    grad = tl.sum(tl.where(after, grad_decay[None, :], 0.0), axis=1)
    gate = tl.load(log_gate_ptr + group * L + tokens, mask=tokens < L, other=0.0).to(tl.float32)
    tl.store(grad_gate_ptr + group * L + tokens, tl.where(gate >= CLOSED, grad, 0.0), mask=tokens < L)


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, w_ptr, weight_ptr, z_weight_ptr, mass_weight_ptr, sums_ptr, zm_ptr,
    x_stride_b, x_stride_h, x_stride_l, y_stride_b, y_stride_h, y_stride_l,
    L, N, H, K, D, M, V, scale, splits, length,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
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
    # Values are the rows: a block of them fills the 64 rows of a Hopper GPU's products where one of features would not.
    total = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    total_second = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    z = tl.zeros((BLOCK_D,), tl.float32)
    z_second = tl.zeros((BLOCK_D,), tl.float32)
    mass = tl.zeros((T,), tl.float32)
    w_ptr = map_of_head(w_ptr, head, K, D, PRECISION)
    for chunk in range(first_chunk, tl.minimum(first_chunk + length, N)):
        tokens = chunk * T + rows
        valid = tokens < L
        high, low = load_map(w_ptr, outputs, K, D, MAP, PRECISION, BLOCK_D, BLOCK_X)
        x, inverse = load_vectors(x_ptr, x_stride_l, rows, valid, K, MAP, UNIT, T, BLOCK_X)
        projected = project(
            x, inverse, high, low, x_ptr, x_stride_l, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        first, second = features(projected, outputs, D, scale, MAP)
        at = group * N * T + tokens
        y = tl.trans(operand(load_tile(y_ptr, rows, values, y_stride_l, valid, V), PRECISION))
        weight, z_weight = tl.load(weight_ptr + at)[:, None], tl.load(z_weight_ptr + at)[:, None]
        total = product(y, operand(first * weight, PRECISION), total, PRECISION)
        z += tl.sum(first * z_weight, axis=0)
        if MAP == "gaussian":
            total_second = product(y, operand(second * weight, PRECISION), total_second, PRECISION)
            z_second += tl.sum(second * z_weight, axis=0)
        mass += tl.load(mass_weight_ptr + at)
        x_ptr += T * x_stride_l
        y_ptr += T * y_stride_l

    there = (outputs[None, :] < D) & (values[:, None] < V)
    at_sums = sums_ptr + (group * splits + split) * M * V + outputs[None, :] * V + values[:, None]
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
def _advance(state, total, gain):
    # Dropped, not multiplied by 0: what went wrong in one document must not reach the next.
    return tl.where(gain == 0.0, 0.0, state * gain) + total


@triton.jit
def scan_kernel(
    sums_ptr, start_ptr, before_ptr, end_ptr, gain_ptr, other_ptr, dot_ptr, N, E,
    REVERSE: tl.constexpr, WITH_DOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, from start to end; in REVERSE the adjoint state after each chunk.

    With `WITH_DOT`, also the product of each with `other` of the same chunk, one part per block.
    Shapes: sums, before, other [G, N, E]; start, end [G, E]; gain [G, N]; dot [G, N, blocks]. Grid: G x blocks.
    """
    group = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = elements < E
    state = tl.load(start_ptr + group * E + elements, mask=there, other=0.0)
    for first in range(0, N, 4):
        # Four loads on their way at once: a load behind a store waits for it.
        n0 = N - 1 - first if REVERSE else first
        step = -1 if REVERSE else 1
        at = group * N + n0
        in1, in2, in3 = first + 1 < N, first + 2 < N, first + 3 < N
        t0 = tl.load(sums_ptr + at * E + elements, mask=there, other=0.0)
        t1 = tl.load(sums_ptr + (at + step) * E + elements, mask=there & in1, other=0.0)
        t2 = tl.load(sums_ptr + (at + 2 * step) * E + elements, mask=there & in2, other=0.0)
        t3 = tl.load(sums_ptr + (at + 3 * step) * E + elements, mask=there & in3, other=0.0)
        g0 = tl.load(gain_ptr + at)
        g1 = tl.load(gain_ptr + at + step, mask=in1, other=1.0)
        g2 = tl.load(gain_ptr + at + 2 * step, mask=in2, other=1.0)
        g3 = tl.load(gain_ptr + at + 3 * step, mask=in3, other=1.0)
        s1 = _advance(state, t0, g0)
        s2 = _advance(s1, t1, g1)
        s3 = _advance(s2, t2, g2)
        if WITH_DOT:
            blocks = tl.num_programs(1)
            dot_at = dot_ptr + at * blocks + tl.program_id(1)
            o0 = tl.load(other_ptr + at * E + elements, mask=there, other=0.0).to(tl.float32)
            o1 = tl.load(other_ptr + (at + step) * E + elements, mask=there & in1, other=0.0).to(tl.float32)
            o2 = tl.load(other_ptr + (at + 2 * step) * E + elements, mask=there & in2, other=0.0).to(tl.float32)
            o3 = tl.load(other_ptr + (at + 3 * step) * E + elements, mask=there & in3, other=0.0).to(tl.float32)
            tl.store(dot_at, tl.sum(state * o0, axis=0))
            tl.store(dot_at + step * blocks, tl.sum(s1 * o1, axis=0), mask=in1)
            tl.store(dot_at + 2 * step * blocks, tl.sum(s2 * o2, axis=0), mask=in2)
            tl.store(dot_at + 3 * step * blocks, tl.sum(s3 * o3, axis=0), mask=in3)
        tl.store(before_ptr + at * E + elements, state.to(before_ptr.dtype.element_ty), mask=there)
        tl.store(before_ptr + (at + step) * E + elements, s1.to(before_ptr.dtype.element_ty), mask=there & in1)
        tl.store(before_ptr + (at + 2 * step) * E + elements, s2.to(before_ptr.dtype.element_ty), mask=there & in2)
        tl.store(before_ptr + (at + 3 * step) * E + elements, s3.to(before_ptr.dtype.element_ty), mask=there & in3)
        state = _advance(s3, t3, g3)
    tl.store(end_ptr + group * E + elements, state, mask=there)

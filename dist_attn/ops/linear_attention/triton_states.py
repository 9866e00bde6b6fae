"""Kernels of what keys leave behind: cumulative gates, and walks over chunks that sum it up.

Stretches of chunks, splits, are walked side by side: first for what each adds, then, from a scan of that, for the state
before each chunk. So sums of chunks, twice as many bytes as states, never reach memory.

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
def _advance(state, total, gain):
    # Dropped, not multiplied by 0: what went wrong in one document must not reach the next.
    return tl.where(gain == 0.0, 0.0, state * gain) + total


@triton.jit
def _leave(s_ptr, z_ptr, total, z, outputs, values, first, D, V):
    """Store rows of a state [M, V], and those of z in the `first` block of values."""
    at = s_ptr + outputs[None, :] * V + values[:, None]
    tl.store(at, total.to(s_ptr.dtype.element_ty), mask=(outputs[None, :] < D) & (values[:, None] < V))
    tl.store(z_ptr + outputs, z, mask=(outputs < D) & first)


@triton.jit
def _meet(s_ptr, z_ptr, total, z, outputs, values, first, D, V):
    """The product of rows of a state and of z with those of another."""
    at = s_ptr + outputs[None, :] * V + values[:, None]
    other = tl.load(at, mask=(outputs[None, :] < D) & (values[:, None] < V), other=0.0).to(tl.float32)
    other_z = tl.load(z_ptr + outputs, mask=(outputs < D) & first, other=0.0)
    return tl.sum(tl.sum(total * other, axis=1), axis=0) + tl.sum(z * other_z, axis=0)


@triton.jit
def sums_kernel(
    x_ptr, y_ptr, w_ptr, weight_ptr, z_weight_ptr, mass_weight_ptr, gain_ptr,
    start_ptr, start_zm_ptr, before_ptr, before_zm_ptr, end_ptr, end_zm_ptr, other_ptr, other_zm_ptr, dot_ptr,
    x_stride_b, x_stride_h, x_stride_l, y_stride_b, y_stride_h, y_stride_l,
    L, N, H, K, D, M, V, scale, splits, length,
    HAS_GAIN: tl.constexpr, HAS_START: tl.constexpr, REVERSE: tl.constexpr, WITH_DOT: tl.constexpr,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Walk the `length` chunks of each split, whose tokens add weight_t phi(x_t) y_t^T, z_weight_t phi(x_t) and
    mass_weight_t to what the gain of a chunk leaves of all before; in REVERSE from the last chunk to the first.

    The sums of each split go to `end`, or with HAS_START, from the states before the splits, the states before all
    chunks to `before` and the one after the last to `end`. With `WITH_DOT`, also the product of each with `other` of
    the same chunk, in parts.

    Shapes: weights [G, N T]; gain [G, N]; start [G, splits, M, V] beside [G, splits, M + 1], before and other likewise
    [G, N, ...], end [G, splits, ...], or [G, ...] with HAS_START; dot [G, N, parts]. Grid: G splits x blocks of
    values x blocks of projections, the last in turn: these read the same tokens.
    """
    program = tl.program_id(0)
    blocks_d = (D + BLOCK_D - 1) // BLOCK_D
    parts = blocks_d * ((V + BLOCK_V - 1) // BLOCK_V)
    part = program % parts
    block_v, block_d = part // blocks_d, part % blocks_d
    group, split = (program // parts // splits).to(tl.int64), program // parts % splits
    batch, head = group // H, group % H
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h
    rows = tl.arange(0, T)
    values = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    outputs = block_d * BLOCK_D + tl.arange(0, BLOCK_D)
    with_z, with_mass = block_v == 0, part == 0
    # Values are the rows: a block of them fills the 64 rows of a Hopper GPU's products where one of features would not.
    total = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    z = tl.zeros((BLOCK_D,), tl.float32)
    mass = 0.0
    total_second, z_second = total, z
    if HAS_START:
        there = (outputs[None, :] < D) & (values[:, None] < V)
        start_ptr += (group * splits + split) * M * V
        start_zm_ptr += (group * splits + split) * (M + 1)
        start_at = start_ptr + outputs[None, :] * V + values[:, None]
        total = tl.load(start_at, mask=there, other=0.0)
        z = tl.load(start_zm_ptr + outputs, mask=outputs < D, other=0.0)
        if MAP == "gaussian":
            total_second = tl.load(start_at + D * V, mask=there, other=0.0)
            z_second = tl.load(start_zm_ptr + D + outputs, mask=outputs < D, other=0.0)
        mass = tl.load(start_zm_ptr + M)
    w_ptr = map_of_head(w_ptr, head, K, D, PRECISION)
    high, low = load_map(w_ptr, outputs, K, D, MAP, PRECISION, BLOCK_D, BLOCK_X)
    count = tl.minimum(length, N - split * length)
    for i in range(count):
        chunk = split * length + i
        if REVERSE:
            chunk = split * length + count - 1 - i
        of_chunk = group * N + chunk
        if HAS_START:
            s_at, zm_at = before_ptr + of_chunk * M * V, before_zm_ptr + of_chunk * (M + 1)
            _leave(s_at, zm_at, total, z, outputs, values, with_z, D, V)
            if MAP == "gaussian":
                _leave(s_at + D * V, zm_at + D, total_second, z_second, outputs, values, with_z, D, V)
            tl.store(zm_at + M, mass, mask=with_mass)
        if WITH_DOT:
            s_at, zm_at = other_ptr + of_chunk * M * V, other_zm_ptr + of_chunk * (M + 1)
            dot = _meet(s_at, zm_at, total, z, outputs, values, with_z, D, V)
            if MAP == "gaussian":
                dot += _meet(s_at + D * V, zm_at + D, total_second, z_second, outputs, values, with_z, D, V)
            dot += mass * tl.load(zm_at + M, mask=with_mass, other=0.0)
            tl.store(dot_ptr + of_chunk * parts + part, dot)
        if HAS_GAIN:
            gain = tl.load(gain_ptr + of_chunk)
            total, z, mass = _advance(total, 0.0, gain), _advance(z, 0.0, gain), _advance(mass, 0.0, gain)
            if MAP == "gaussian":
                total_second, z_second = _advance(total_second, 0.0, gain), _advance(z_second, 0.0, gain)
        tokens = chunk * T + rows
        valid = tokens < L
        x_at, y_at = x_ptr + chunk.to(tl.int64) * T * x_stride_l, y_ptr + chunk.to(tl.int64) * T * y_stride_l
        x, inverse = load_vectors(x_at, x_stride_l, rows, valid, K, MAP, UNIT, T, BLOCK_X)
        projected = project(
            x, inverse, high, low, x_at, x_stride_l, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        first, second = features(projected, outputs, D, scale, MAP, PRECISION)
        at = group * N * T + tokens
        y = tl.trans(operand(load_tile(y_at, rows, values, y_stride_l, valid, V), PRECISION))
        weight, z_weight = tl.load(weight_ptr + at)[:, None], tl.load(z_weight_ptr + at)[:, None]
        total = product(y, operand(first * weight, PRECISION), total, PRECISION)
        z += tl.sum(first * z_weight, axis=0)
        if MAP == "gaussian":
            total_second = product(y, operand(second * weight, PRECISION), total_second, PRECISION)
            z_second += tl.sum(second * z_weight, axis=0)
        mass += tl.sum(tl.load(mass_weight_ptr + at), axis=0)

    of_end = group
    ends = True
    if HAS_START:
        ends = split == (0 if REVERSE else splits - 1)
    else:
        of_end = group * splits + split
    if ends:
        s_at, zm_at = end_ptr + of_end * M * V, end_zm_ptr + of_end * (M + 1)
        _leave(s_at, zm_at, total, z, outputs, values, with_z, D, V)
        if MAP == "gaussian":
            _leave(s_at + D * V, zm_at + D, total_second, z_second, outputs, values, with_z, D, V)
        tl.store(zm_at + M, mass, mask=with_mass)


@triton.jit
def scan_kernel(
    sums_ptr, start_ptr, gain_ptr, N, E, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In the place of the sums of splits, the state before each, from `start`; in REVERSE the one after each.

    Shapes: sums [G, N, E]; start [G, E]; gain [G, N]. Grid: G x blocks.
    """
    group = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = elements < E
    state = tl.load(start_ptr + group * E + elements, mask=there, other=0.0)
    for n in range(N):
        at = group * N + (N - 1 - n if REVERSE else n)
        total = tl.load(sums_ptr + at * E + elements, mask=there, other=0.0)
        tl.store(sums_ptr + at * E + elements, state, mask=there)
        state = _advance(state, total, tl.load(gain_ptr + at))

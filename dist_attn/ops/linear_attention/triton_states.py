"""Kernels of what keys leave behind: cumulative gates, and walks over chunks that sum it up.

Stretches of chunks, splits, are walked side by side. A token adds weight_t phi(x_t) y_t^T, z_weight_t phi(x_t) and
mass_weight_t to what its chunk's gain leaves of all before; in REVERSE the last chunk comes first. A first walk leaves
the sums of each split at its `end`. A second one begins at the states that a scan of these gives (HAS_START), leaves
the state `before` each chunk, after the last one its `end`, and with WITH_DOT the product of each state with the
`other` of its chunk, in parts. So sums of chunks, twice as many bytes as states, never reach memory.

Every tensor of one number a token is float32 [G, N T], G = B H, for N chunks of T tokens, the last filled up with
zeros. Sums over features are [G, N, M, V] beside [G, N, M + 1]: z, and the mass in the last column. The same kernels
serve the backward pass, where the sums are those of queries and the scan runs from the last chunk to the first.

Shape letters: B batch, H heads, L tokens, K head size, D projections, M features, V values, E elements of a state.
"""

import triton
import triton.language as tl

from dist_attn.ops.linear_attention.triton_features import (
    features_across,
    load_map,
    load_tile,
    load_vectors,
    map_of_head,
    operand,
    product,
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
def _times(state, gain):
    # Dropped, not multiplied by 0: what went wrong in one document must not reach the next.
    return tl.where(gain == 0.0, 0.0, state * gain)


@triton.jit
def _left(total, total_second, z, z_second, mass, gain):
    """The parts of a state that a chunk's gain leaves.

    Taken where x has come already, and not among the products, which would then wait for each other.
    """
    total, total_second = _times(total, gain), _times(total_second, gain)
    return total, total_second, _times(z, gain), _times(z_second, gain), _times(mass, gain)


@triton.jit
def _weights(weight_ptr, z_weight_ptr, mass_weight_ptr, at, scale):
    """The weights of a chunk's features as rows, with their scale, and the sum of those of its mass."""
    weight, z_weight = tl.load(weight_ptr + at) * scale, tl.load(z_weight_ptr + at) * scale
    return weight[None, :], z_weight[None, :], tl.sum(tl.load(mass_weight_ptr + at), axis=0)


@triton.jit
def _add(total, z, phi, y, weight, z_weight, ALIKE: tl.constexpr, PRECISION: tl.constexpr):
    """The sums and what a chunk adds: products of features with values, and features; ALIKE says of one weight."""
    weighted = phi * weight
    total = product(operand(weighted, PRECISION), y, total, PRECISION)
    return total, z + tl.sum(weighted if ALIKE else phi * z_weight, axis=1)


@triton.jit
def _part(s_ptr, outputs, values, D, V):
    """The addresses of rows of a state [M, V], and which of them are there."""
    at = s_ptr + outputs[:, None] * V + values[None, :]
    return at, (outputs[:, None] < D) & (values[None, :] < V)


@triton.jit
def _begin(
    s_ptr, zm_ptr, outputs, values, D, M, V,
    HAS_START: tl.constexpr, MAP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program's part of the state at an address, or of none: both parts of S and of z, and the mass."""
    total, z, mass = tl.zeros((BLOCK_D, BLOCK_V), tl.float32), tl.zeros((BLOCK_D,), tl.float32), 0.0
    total_second, z_second = total, z
    if HAS_START:
        at, there = _part(s_ptr, outputs, values, D, V)
        total = tl.load(at, mask=there, other=0.0)
        z = tl.load(zm_ptr + outputs, mask=outputs < D, other=0.0)
        if MAP == "gaussian":
            total_second = tl.load(at + D * V, mask=there, other=0.0)
            z_second = tl.load(zm_ptr + D + outputs, mask=outputs < D, other=0.0)
        mass = tl.load(zm_ptr + M)
    return total, total_second, z, z_second, mass


@triton.jit
def _leave(
    s_ptr, zm_ptr, total, total_second, z, z_second, mass, outputs, values, with_z, with_mass, D, M, V,
    MAP: tl.constexpr,
):  # fmt: skip
    """Store a program's part of a state; `with_z` and `with_mass` in one program of those that have the same."""
    at, there = _part(s_ptr, outputs, values, D, V)
    tl.store(at, total.to(s_ptr.dtype.element_ty), mask=there)
    tl.store(zm_ptr + outputs, z, mask=(outputs < D) & with_z)
    if MAP == "gaussian":
        tl.store(at + D * V, total_second.to(s_ptr.dtype.element_ty), mask=there)
        tl.store(zm_ptr + D + outputs, z_second, mask=(outputs < D) & with_z)
    tl.store(zm_ptr + M, mass, mask=with_mass)


@triton.jit
def _meet(
    dot_ptr, s_ptr, zm_ptr, total, total_second, z, z_second, mass, outputs, values, with_z, with_mass, D, M, V,
    MAP: tl.constexpr,
):  # fmt: skip
    """Store the product of a program's part of a state with that of another."""
    at, there = _part(s_ptr, outputs, values, D, V)
    in_z = (outputs < D) & with_z
    products = total * tl.load(at, mask=there, other=0.0).to(tl.float32)
    z_products = z * tl.load(zm_ptr + outputs, mask=in_z, other=0.0)
    if MAP == "gaussian":
        products += total_second * tl.load(at + D * V, mask=there, other=0.0).to(tl.float32)
        z_products += z_second * tl.load(zm_ptr + D + outputs, mask=in_z, other=0.0)
    masses = mass * tl.load(zm_ptr + M, mask=with_mass, other=0.0)
    tl.store(dot_ptr, tl.sum(tl.sum(products, axis=1), axis=0) + tl.sum(z_products, axis=0) + masses)


# Not another kernel where a split has one chunk: a trial of few tokens runs the one of many.
@triton.jit(do_not_specialize=["splits", "length"])
def sums_kernel(
    x_ptr, y_ptr, w_ptr, weight_ptr, z_weight_ptr, mass_weight_ptr, gain_ptr,
    start_ptr, start_zm_ptr, before_ptr, before_zm_ptr, end_ptr, end_zm_ptr, other_ptr, other_zm_ptr, dot_ptr,
    x_stride_b, x_stride_h, x_stride_l, y_stride_b, y_stride_h, y_stride_l,
    L, N, H, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, scale, splits, length,
    HAS_START: tl.constexpr, REVERSE: tl.constexpr, WITH_DOT: tl.constexpr,
    ALIKE: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Walk a split; see above. Grid: G splits x blocks of values x blocks of projections, which read the same tokens.

    Shapes: weights [G, N T]; gain [G, N]; start [G, splits, M, V] beside [G, splits, M + 1], before and other likewise
    [G, N, ...], end [G, splits, ...], or [G, ...] with HAS_START; dot [G, N, parts].
    """
    program, blocks_d = tl.program_id(0), (D + BLOCK_D - 1) // BLOCK_D
    parts = blocks_d * ((V + BLOCK_V - 1) // BLOCK_V)
    group, split, part = (program // parts // splits).to(tl.int64), program // parts % splits, program % parts
    x_ptr += group // H * x_stride_b + group % H * x_stride_h
    y_ptr += group // H * y_stride_b + group % H * y_stride_h
    rows = tl.arange(0, T)
    values = part // blocks_d * BLOCK_V + tl.arange(0, BLOCK_V)
    outputs = part % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    with_z, with_mass = part // blocks_d == 0, part == 0
    at = group * splits + split
    total, total_second, z, z_second, mass = _begin(
        start_ptr + at * M * V, start_zm_ptr + at * (M + 1), outputs, values, D, M, V, HAS_START, MAP, BLOCK_D, BLOCK_V
    )  # fmt: skip
    w_ptr = map_of_head(w_ptr, group % H, K, D, PRECISION)
    high, low = load_map(w_ptr, outputs, K, D, MAP, PRECISION, BLOCK_D, BLOCK_X)
    count = tl.minimum(length, N - split * length)
    for i in range(count):
        chunk = split * length + (count - 1 - i if REVERSE else i)
        of_chunk = group * N + chunk
        if HAS_START:
            _leave(
                before_ptr + of_chunk * M * V, before_zm_ptr + of_chunk * (M + 1), total, total_second, z, z_second,
                mass, outputs, values, with_z, with_mass, D, M, V, MAP,
            )  # fmt: skip
        if WITH_DOT:
            _meet(
                dot_ptr + of_chunk * parts + part, other_ptr + of_chunk * M * V, other_zm_ptr + of_chunk * (M + 1),
                total, total_second, z, z_second, mass, outputs, values, with_z, with_mass, D, M, V, MAP,
            )  # fmt: skip
        # Read before features are made, as nothing prefetches them.
        weight, z_weight, own_mass = _weights(weight_ptr, z_weight_ptr, mass_weight_ptr, of_chunk * T + rows, scale)
        gain = tl.load(gain_ptr + of_chunk)
        valid, start = chunk * T + rows < L, chunk.to(tl.int64) * T
        x_at, y_at = x_ptr + start * x_stride_l, y_ptr + start * y_stride_l
        x, inverse = load_vectors(x_at, x_stride_l, rows, valid, K, MAP, UNIT, T, BLOCK_X)
        total, total_second, z, z_second, mass = _left(total, total_second, z, z_second, mass, gain)
        first, second = features_across(
            x, inverse, high, low, x_at, x_stride_l, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        y = operand(load_tile(y_at, rows, values, y_stride_l, valid, V), PRECISION)
        total, z = _add(total, z, first, y, weight, z_weight, ALIKE, PRECISION)
        if MAP == "gaussian":
            total_second, z_second = _add(total_second, z_second, second, y, weight, z_weight, ALIKE, PRECISION)
        mass += own_mass
    at = group if HAS_START else at
    if not HAS_START or split == (0 if REVERSE else splits - 1):
        _leave(
            end_ptr + at * M * V, end_zm_ptr + at * (M + 1), total, total_second, z, z_second,
            mass, outputs, values, with_z, with_mass, D, M, V, MAP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
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
        state = _times(state, tl.load(gain_ptr + at)) + total

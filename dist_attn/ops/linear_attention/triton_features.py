"""Feature maps as parts of GPU kernels: a tile of phi(x) is made where it is used and never reaches memory.

Maps go by name: `none` (x is phi already), `elu`, `arc_cosine` and `gaussian`. A tile covers T tokens and some of the D
projections, or of the columns of x itself for the first two. A Gaussian tile has two parts, sines and cosines; of the
others both parts are the same tile, and only the first counts.

How tiles enter matrix units, by the inputs' type:

| precision | inputs | scores: `narrow` | weighted values, states, gradients: `operand` | projections w x |
|---|---|---|---|---|
| bf16 | bfloat16 | bfloat16 | bfloat16 | x is exact, w in two parts: 16 bits of w |
| bf16_interpreted | bfloat16 | the same roundings in float32: numpy has no bfloat16 | the same | as bf16 |
| fp16 | float16 | float16 | tf32: float16's digits with float32's range | x is exact, w in two parts: 22 bits of w |
| ieee | float32 | float32 in three tf32 products, which keep 22 bits | the same | three tf32 products |

Of float16 inputs, sums over 100,000 tokens pass float16's largest number, and gradients divided by them its smallest.

All sums are float32.
"""

import triton
import triton.language as tl

from dist_attn.ops.kernel_target import use_newest_assembler

use_newest_assembler()  # before a kernel is compiled


@triton.jit
def sine_and_cosine(x):
    """Compute both to 1e-7 while |x| < 1e4, by polynomials on a quarter turn: the library's sine may use local memory.

    The coefficients are least-squares fits on [-pi/4, pi/4] with errors of 3e-9 and 1e-10.
    """
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    # pi / 2 in three parts, of which the first two are short, so that their products with whole numbers are exact.
    r = ((x - turns * 1.5703125) - turns * 0.00048351287841796875) - turns * 3.1391647326017846e-07
    z = r * r
    sine = r + r * z * (-0.16666647 + z * (0.0083318 - z * 0.00019476))
    cosine = 1.0 - 0.5 * z + z * z * (0.0416666427 + z * (-0.00138871847 + z * 2.44191877e-05))
    quarter = turns.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    first = tl.where(odd, cosine, sine)
    second = tl.where(odd, sine, cosine)
    return tl.where(quarter >= 2, -first, first), tl.where(((quarter + 1) & 2) != 0, -second, second)


@triton.jit
def fast_sine_and_cosine(x):
    """Compute both to 4e-5 while |x| < 314, by the GPU's own instructions; bfloat16 keeps three digits of them."""
    sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    cosine = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return sine, cosine


@triton.jit
def fast_exp(x):
    """Compute exp x by the GPU's own instruction; 0 below 1e-38."""
    power = x * 1.4426950408889634
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, is_pure=True, pack=1)


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x as it enters a matrix product."""
    if PRECISION == "bf16":
        return x.to(tl.bfloat16)
    elif PRECISION == "bf16_interpreted":
        # Rounded to the nearest, ties to even, as a GPU does; the interpreter itself cuts off.
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, PRECISION: tl.constexpr):
    """`operand` of an input or of features that meet another such: numbers of the inputs' own range."""
    if PRECISION == "fp16":
        return x.to(tl.float16)
    else:
        return operand(x, PRECISION)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b in float32, of two operands."""
    if PRECISION == "ieee":
        return tl.dot(a, b, acc=total, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc=total, input_precision="tf32")


@triton.jit
def inputs_product(a, b, total, PRECISION: tl.constexpr):
    """total + a b of two tiles as they are in memory: those that are float16 need no other type."""
    if PRECISION == "fp16" and a.dtype == tl.float16 and b.dtype == tl.float16:
        return tl.dot(a, b, acc=total)
    else:
        return product(operand(a, PRECISION), operand(b, PRECISION), total, PRECISION)


@triton.jit
def parts_product(a, b, total, PRECISION: tl.constexpr):
    """total + a b of an input a and float32 numbers b, which enter in two parts where a is of 16 bits."""
    if PRECISION == "ieee" or (PRECISION == "fp16" and a.dtype != tl.float16):
        return product(a.to(tl.float32), b, total, "ieee")
    else:
        high = narrow(b, PRECISION)
        total = product(narrow(a, PRECISION), high, total, PRECISION)
        return product(narrow(a, PRECISION), narrow(b - high.to(tl.float32), PRECISION), total, PRECISION)


@triton.jit
def load_tile(x_ptr, rows, columns, stride, valid, size):
    """Rows of [tokens, size] as they are in memory; 0 where a token is not valid or a column not there.

    The pointer stands at the first row of the chunk: offsets from there fit into 32 bits, and half the registers.
    """
    at = x_ptr + rows[:, None] * stride + columns[None, :]
    return tl.load(at, mask=valid[:, None] & (columns[None, :] < size), other=0.0)


@triton.jit
def store_tile(ptr, stride, rows, valid, columns, size, tile):
    """`load_tile` the other way, in the type of the memory."""
    at = ptr + rows[:, None] * stride + columns[None, :]
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=valid[:, None] & (columns[None, :] < size))


@triton.jit
def load_projections(w_ptr, inputs, outputs, K, D):
    """[inputs, outputs] of w [D, K]."""
    at = w_ptr + outputs[None, :] * K + inputs[:, None]
    return tl.load(at, mask=(inputs[:, None] < K) & (outputs[None, :] < D), other=0.0)


@triton.jit
def map_of_head(w_ptr, head, K, D, PRECISION: tl.constexpr):
    """The address of a head's w: float32 [D, K], or its two parts, [2, D, K]; see `triton_forward.map_operand`."""
    if PRECISION == "ieee":
        return w_ptr + head * D * K
    else:
        return w_ptr + head * 2 * D * K


@triton.jit
def load_map(
    w_ptr, outputs, K, D, MAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """The two parts of some projections, [BLOCK_D, BLOCK_X] each; zeros where `project` reads w or none is there."""
    if MAP == "none" or MAP == "elu" or PRECISION == "ieee":
        high = tl.zeros((BLOCK_D, 16), tl.float32)
        low = high
    else:
        inputs = tl.arange(0, BLOCK_X)
        high = load_tile(w_ptr, outputs, inputs, K, outputs < D, K)
        low = load_tile(w_ptr + D * K, outputs, inputs, K, outputs < D, K)
    return high, low


@triton.jit
def load_vectors(
    x_ptr, stride, rows, valid, K, MAP: tl.constexpr, UNIT: tl.constexpr, T: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """All columns of x, read once for all its projections, and 1 / |x| [T] (ones without UNIT).

    Maps without w read columns where they are used: zeros stand for x here.
    """
    inverse = tl.full((T,), 1.0, tl.float32)
    if MAP == "none" or MAP == "elu":
        x = tl.zeros((T, 16), tl.float32)
    else:
        x = load_tile(x_ptr, rows, tl.arange(0, BLOCK_X), stride, valid, K)
        if UNIT:
            square = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
            inverse = tl.rsqrt(tl.where(square < 1.1754944e-38, 1.0, square))  # GPUs take what is denormal for 0
    return x, inverse


@triton.jit
def project(
    x, inverse, high, low, x_ptr, stride, rows, valid, w_ptr, outputs, K, D,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """w x / |x| [T, BLOCK_D] (without the length unless UNIT); for maps without w columns of x."""
    if MAP == "none" or MAP == "elu":
        projected = load_tile(x_ptr, rows, outputs, stride, valid, K).to(tl.float32)
    else:
        projected = tl.zeros((T, BLOCK_D), tl.float32)
        if PRECISION == "ieee":
            # Some columns at a time: three products of all of them would fill the registers.
            for first in range(0, K, 32):
                inputs = first + tl.arange(0, 32)
                part = load_tile(x_ptr, rows, inputs, stride, valid, K)
                w = load_tile(w_ptr, outputs, inputs, K, outputs < D, K)
                projected = product(part, tl.trans(w), projected, PRECISION)
        else:
            projected = product(narrow(x, PRECISION), tl.trans(narrow(high, PRECISION)), projected, PRECISION)
            projected = product(narrow(x, PRECISION), tl.trans(narrow(low, PRECISION)), projected, PRECISION)
        if UNIT:
            projected = projected * inverse[:, None]
    return projected


@triton.jit
def features(projected, there, scale, MAP: tl.constexpr, PRECISION: tl.constexpr):
    """The two parts of phi; 0 where a projection is not `there`."""
    if MAP == "gaussian":
        if PRECISION == "bf16":
            sine, cosine = fast_sine_and_cosine(projected)
        else:
            sine, cosine = sine_and_cosine(projected)
        first = sine * scale
        second = tl.where(there, cosine * scale, 0.0)
    elif MAP == "arc_cosine":
        first = tl.where(projected > 0.0, projected * scale, 0.0)
        second = first
    elif MAP == "elu":
        if PRECISION == "bf16":
            power = fast_exp(projected)
        else:
            power = tl.exp(projected)
        first = tl.where(projected > 0.0, projected + 1.0, power)
        second = first
    else:
        first = projected
        second = first
    return tl.where(there, first, 0.0), second


@triton.jit
def features_across(
    x, inverse, high, low, x_ptr, stride, rows, valid, w_ptr, outputs, K, D,
    MAP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Both parts of phi before their scale as rows, [BLOCK_D, T]; anything in rows that are not there."""
    if MAP == "none" or MAP == "elu" or PRECISION == "ieee":
        projected = project(
            x, inverse, high, low, x_ptr, stride, rows, valid, w_ptr, outputs, K, D,
            MAP, UNIT, PRECISION, T, BLOCK_D,
        )  # fmt: skip
        projected = tl.trans(projected)
    else:
        x = tl.trans(narrow(x, PRECISION))
        projected = product(narrow(high, PRECISION), x, tl.zeros((BLOCK_D, T), tl.float32), PRECISION)
        projected = product(narrow(low, PRECISION), x, projected, PRECISION)
        if UNIT:
            projected = projected * inverse[None, :]
    return features(projected, True, 1.0, MAP, PRECISION)


@triton.jit
def projection_gradient(projected, grad_first, grad_second, first, second, MAP: tl.constexpr):
    """The gradient of what `features` was given with a scale of 1, from those of its two parts."""
    if MAP == "gaussian":
        return grad_first * second - grad_second * first
    elif MAP == "arc_cosine":
        return tl.where(projected > 0.0, grad_first, 0.0)
    elif MAP == "elu":
        return tl.where(projected > 0.0, grad_first, grad_first * first)
    else:
        return grad_first

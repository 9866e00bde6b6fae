"""Numbers in fewer bytes, for storage that says so: bfloat16, or 8-bit integers with a scale for every block."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import WireError

Encoding = Literal["raw", "bf16", "int8"]

BLOCK = 64
"""The numbers that share one scale."""

MAX_SCALE = np.float32(2.6e36)  # 127 times this is still finite


def encoded_bytes(encoding: Encoding, numbers: int, number_bytes: int) -> int:
    """The bytes of `numbers` numbers; `number_bytes` counts where they are stored as they are."""
    match encoding:
        case "raw":
            return numbers * number_bytes
        case "bf16":
            return 2 * numbers
        case "int8":
            return 4 * -(-numbers // BLOCK) + numbers


def encode_compact(x_N: NDArray[np.float32], encoding: Literal["bf16", "int8"]) -> NDArray[Any]:
    """Encode float32 numbers in 2 bytes each (relative error <= 2^-8), or 1 and a scale a block (<= max|block| / 254).

    Shapes: [N] -> [N] uint16 for bf16; [4 ceil(N / BLOCK) + N] uint8 for int8, the scales first.
    Raises: WireError for numbers that are not finite, or are not any more.
    """
    if not np.isfinite(x_N).all():
        raise WireError(f"a state with NaN or infinite numbers cannot be stored as {encoding}; store it exactly")
    return _to_bf16(x_N) if encoding == "bf16" else _to_int8(x_N)


def decode_compact(data: memoryview, encoding: Literal["bf16", "int8"], numbers: int) -> NDArray[np.float32]:
    """Decode numbers that `encode_compact` has stored; they are nearly the original ones.

    Raises: WireError for scales or numbers that it never writes.
    """
    if encoding == "bf16":
        x_N = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(x_N).all():
            raise WireError("an array stored as bf16 holds NaN or infinite numbers, which are never stored so")
        return x_N
    blocks = -(-numbers // BLOCK)
    scale_B = np.frombuffer(data[: 4 * blocks], dtype="<f4")
    if not ((scale_B >= 0) & (scale_B <= MAX_SCALE)).all():  # no NaN is either
        raise WireError(f"a scale of an array stored as int8 is not in [0, {MAX_SCALE:g}]")
    q_N = np.frombuffer(data[4 * blocks :], dtype=np.int8)
    if (q_N == -128).any():
        raise WireError("an array stored as int8 holds -128, which is never stored")
    return q_N.astype(np.float32) * np.repeat(scale_B.astype(np.float32), BLOCK)[:numbers]


def _to_bf16(x_N: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = x_N.view(np.uint32)
    # To the nearest, ties to even.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    if ((rounded & 0x7FFF) >= 0x7F80).any():
        raise WireError("a number of this state is too large for bf16; store it exactly")
    return rounded


def _to_int8(x_N: NDArray[np.float32]) -> NDArray[np.uint8]:
    padded_BN = np.zeros((-(-len(x_N) // BLOCK), BLOCK), dtype=np.float32)
    padded_BN.reshape(-1)[: len(x_N)] = x_N
    scale_B = (np.abs(padded_BN).max(axis=1, initial=0.0) / 127.0).astype("<f4")
    if (scale_B > MAX_SCALE).any():
        raise WireError("a number of this state is too large for int8; store it exactly")
    # Numbers so small that their scale is 0 or has few digits are dropped.
    normal_B1 = np.where(scale_B < np.finfo(np.float32).tiny, np.inf, scale_B)[:, None]
    q_BN = np.clip(np.rint(padded_BN / normal_B1), -127, 127).astype(np.int8)
    return np.concatenate([scale_B.view(np.uint8), q_BN.reshape(-1)[: len(x_N)].view(np.uint8)])

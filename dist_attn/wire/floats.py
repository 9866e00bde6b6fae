"""Float32 numbers as the shortest decimals that read back as the same numbers."""

import numpy as np
import numpy.typing as npt

__all__ = ["shortest_float32"]

_POWERS_OF_TEN = np.array([float(f"1e{k}") for k in range(64)])


def shortest_float32(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Find for each value the float64 that prints with the fewest digits and still reads back as that float32.

    A float32 needs at most 9 significant digits; 7 or 8 are tried first. Scaling by a power of ten up to
    10^22 is exact in float64, so the rounded quotient prints as the short decimal itself.
    """
    exact = values.astype(np.float64)
    size = np.abs(exact)
    exponent = np.floor(np.log10(np.where(size == 0, 1.0, size))).astype(np.int64)
    best = exact.copy()
    for digits in (9, 8, 7):
        shift = digits - 1 - exponent
        scale = _POWERS_OF_TEN[np.abs(shift)]
        rounded = np.where(shift >= 0, np.rint(exact * scale) / scale, np.rint(exact / scale) * scale)
        best = np.where(rounded.astype(np.float32) == values, rounded, best)
    return best

"""How close is close enough: one table for the whole suite, by dtype and by kind of quantity."""

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["exact", "output", "state", "gradient", "golden"]

# (rtol, atol). "exact": moved, not computed. "output" and "state": another order of the same sums over a few thousand
# tokens. "gradient": as output, through a division and back. "golden": files that were computed elsewhere.
TOLERANCES: dict[torch.dtype, dict[Kind, tuple[float, float]]] = {
    torch.float64: {
        "exact": (0.0, 0.0),
        "output": (1e-10, 1e-12),
        "state": (1e-11, 1e-12),
        "gradient": (1e-9, 1e-11),
        "golden": (1e-9, 1e-10),
    },
    torch.float32: {
        "exact": (0.0, 0.0),
        "output": (2e-4, 2e-5),
        "state": (1e-4, 1e-5),
        "gradient": (1e-3, 1e-4),
        "golden": (2e-4, 2e-5),
    },
    torch.bfloat16: {
        "exact": (0.0, 0.0),
        "output": (2e-2, 2e-2),
        "state": (2e-2, 2e-2),
        "gradient": (5e-2, 5e-2),
        "golden": (2e-2, 2e-2),
    },
    torch.float16: {
        "exact": (0.0, 0.0),
        "output": (3e-3, 3e-3),
        "state": (3e-3, 3e-3),
        "gradient": (1e-2, 1e-2),
        "golden": (3e-3, 3e-3),
    },
}
REAL_PART = {torch.complex128: torch.float64, torch.complex64: torch.float32}


def assert_close(got: Tensor, want: Tensor, *, kind: Kind = "output", what: str = "") -> None:
    """Fail unless `got` equals `want` in shape, in dtype and, to the table's tolerance, in every element.

    NaN never counts as equal: it is how an element that nobody wrote shows. Whole numbers must be equal.
    """
    table = TOLERANCES.get(REAL_PART.get(got.dtype, got.dtype))
    rtol, atol = table[kind] if table is not None else (0.0, 0.0)
    torch.testing.assert_close(
        got.detach(), want.detach(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}" if what else text
    )

"""The independent test vectors in tests/golden, as float64 tensors."""

from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(name: str) -> dict[str, torch.Tensor]:
    """All arrays of tests/golden/NAME.npz."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(np.ascontiguousarray(arrays[key])) for key in arrays.files}

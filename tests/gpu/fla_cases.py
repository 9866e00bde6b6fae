"""What flash-linear-attention's kernels must give behind our operations, where it is installed for a GPU."""

from importlib.util import find_spec

from benchmarks.gpu.cases import DEVICE, Cases
from tests.gpu.affine_cases import fla_affine_cases
from tests.gpu.kernel_cases import fla_linear_cases

__all__ = ["fla_cases"]


def fla_cases(*, tiny: bool) -> Cases:
    """All of them but in the interpreter, in which its tests have it; the record has them operation by operation."""
    there = DEVICE == "cuda" and find_spec("fla") is not None and not tiny
    return {**fla_affine_cases(), **fla_linear_cases()} if there else {}

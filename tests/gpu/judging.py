"""When what a GPU has found is right: errors against an exact result."""

from collections.abc import Mapping

import torch

from benchmarks.gpu.cases import Row

__all__ = ["ACCEPTED", "judged", "name_of"]

Results = Mapping[str, torch.Tensor | None]

# Largest accepted error over the largest number of the exact result: a few roundings of the inputs' type.
ACCEPTED = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def name_of(dtype: torch.dtype) -> str:
    """As it is written in the name of a case."""
    return str(dtype).removeprefix("torch.")


def judged(want: Results, got: Results, dtype: torch.dtype) -> Row:
    """The largest difference of each result over its largest number, and whether all are within what `dtype` rounds."""
    errors = {}
    for name, exact in want.items():
        ours = got[name]
        assert exact is not None and ours is not None, name
        scale = exact.detach().abs().max().double().clamp_min(torch.finfo(torch.float32).tiny).to(ours.device)
        difference = ours.detach().double() - exact.detach().double().to(ours.device)
        errors[name] = float(difference.abs().max() / scale)
    # Not "<=" turned round: what is no number is wrong.
    return {"errors": errors, "right": all(error < ACCEPTED[dtype] for error in errors.values())}

"""A run stops before the step that would spoil its weights, and says where it went wrong."""

import math

import torch
from torch import nn

from dist_attn.errors import EngineError

__all__ = ["check_finite"]


def check_finite(what: str, value: float, step: int, model: nn.Module) -> None:
    """Raises EngineError where `value` is not a number that training can go on with."""
    if not math.isfinite(value):
        raise EngineError(
            f"the {what} is {value} at step {step}; {_first_bad(model)}. The last checkpoint is sound: "
            "lower optimiser.learning_rate in a new run"
        )


def _first_bad(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the first parameter that is not finite is {name}"
    return "all parameters are finite"

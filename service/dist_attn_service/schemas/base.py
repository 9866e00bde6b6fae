"""What every schema is made of."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["Input", "Output", "digits"]


class Input(BaseModel):
    """Base of what clients send: unknown keys are refused, nothing is converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Output(BaseModel):
    """Base of what clients get."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def digits(value: Any) -> Any:
    """In a query a number is its digits: not 5.0, +5 or 5_0, which Python would read as well."""
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]+", value):
        raise ValueError("a whole number was needed, in digits alone")
    return value

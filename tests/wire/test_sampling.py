"""What a sampling specification may say."""

import math
from typing import Any

import msgspec
import pytest

from dist_attn.errors import InputError
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.specs import check_sampling


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0},
        {"temperature": 5e-324},
        {"top_k": 1},
        {"top_k": 10**6},
        {"top_p": 5e-324},
        {"seed": -(1 << 63)},
        {"seed": (1 << 63) - 1},
        {"max_tokens": 1 << 53},
    ],
)
def test_accepted(change: dict[str, Any]) -> None:
    """Values up to the edges of what is accepted pass."""
    check_sampling(msgspec.structs.replace(SamplingSpec(max_tokens=1), **change))


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"max_tokens": (1 << 53) + 1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": -1.0},
        {"top_p": 1.001},
        {"top_p": math.nan},
        {"seed": 1 << 63},
    ],
    ids=str,
)
def test_refused(change: dict[str, Any]) -> None:
    """A value that no draw can follow is refused with its name, what was given and what is accepted."""
    ((name, value),) = change.items()
    with pytest.raises(InputError, match=f"^{name} is {value}; it must "):
        check_sampling(msgspec.structs.replace(SamplingSpec(max_tokens=1), **change))

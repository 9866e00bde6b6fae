"""What a sampling specification may say, checked in words before it travels."""

import math

from dist_attn.errors import InputError
from dist_attn.wire.messages import SamplingSpec

__all__ = ["check_sampling"]

_LARGEST = 1 << 53  # as in the messages: whole numbers that every JSON reader keeps exact


def check_sampling(spec: SamplingSpec) -> None:
    """Refuse a specification that no draw can follow.

    Raises: InputError naming the value, what is accepted, and what switches the filter off.
    """
    if not 1 <= spec.max_tokens <= _LARGEST:
        raise InputError(f"max_tokens is {spec.max_tokens}; it must be at least 1 (and at most {_LARGEST})")
    if not 0 <= spec.min_tokens <= spec.max_tokens:
        raise InputError(f"min_tokens is {spec.min_tokens}; it must be from 0 to max_tokens ({spec.max_tokens})")
    if not (math.isfinite(spec.temperature) and spec.temperature >= 0):
        raise InputError(
            f"temperature is {spec.temperature}; it must be a finite number, 0 or more (0 takes the likeliest token)"
        )
    if not 0 <= spec.top_k <= _LARGEST:
        raise InputError(f"top_k is {spec.top_k}; it must be 0 (off) or the number of likeliest tokens to draw from")
    if not 0 < spec.top_p <= 1:
        raise InputError(f"top_p is {spec.top_p}; it must be above 0 and at most 1 (1 switches the filter off)")
    if spec.seed is not None and not -(1 << 63) <= spec.seed < 1 << 63:
        raise InputError(f"seed is {spec.seed}; it must fit into 64 bits: from -2**63 to 2**63 - 1")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(spec, name)
        if not -2 <= penalty <= 2:
            raise InputError(f"{name} is {penalty}; it must be from -2 to 2 (0 switches it off)")
    for token, bias in spec.logit_bias.items():
        if token < 0 or not -100 <= bias <= 100:
            raise InputError(f"logit_bias of token {token} is {bias}; it must be a known token's, from -100 to 100")

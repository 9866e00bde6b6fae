"""Why a configuration was refused, in one line: the key as it stands in the file, the rule, and what was given."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

GIVEN_CHARACTERS = 80
PLAIN = {"missing": "it is missing", "extra_forbidden": "there is no such key; leave it out"}
"""Our words for kinds of errors whose own speak of inputs and fields."""
WITHOUT_GIVEN = ("missing", "extra_forbidden", "value_error", "union_tag_invalid", "union_tag_not_found")


def refusal(error: ValidationError, values: Any) -> tuple[str, str]:
    """The key (empty: the whole) and the words of the first error in `values`, which were refused with `error`.

    Where a value may be one of several things, the thing that it resembles most speaks, or all of them in turn.
    """
    errors = error.errors(include_url=False, include_context=False)
    keys = [_key(one["loc"], values, missing=one["type"] == "missing") for one in errors]
    about_first = [key for key in keys if key[: len(keys[0])] == keys[0]]
    deepest = max(about_first, key=len)
    chosen = [one for one, key in zip(errors, keys, strict=True) if key == deepest]
    words = ", or ".join(
        dict.fromkeys(PLAIN.get(one["type"], one["msg"].removeprefix("Value error, ")) for one in chosen)
    )
    given = repr(chosen[0]["input"])
    if chosen[0]["type"] not in WITHOUT_GIVEN and len(given) <= GIVEN_CHARACTERS:
        words += f"; given is {given}"
    return ".".join(deepest), words


def _key(place: Sequence[int | str], values: Any, *, missing: bool) -> list[str]:
    """The parts of a place that stand in the file; pydantic also names the kinds and the members of unions."""
    parts = []
    for number, part in enumerate(place):
        inside = values if isinstance(values, Mapping) else dict(enumerate(values if isinstance(values, list) else ()))
        if part in inside:
            values = inside[part]
        elif not (missing and number == len(place) - 1):
            continue
        parts.append(str(part))
    return parts

"""The reason why a configuration was refused, in one line: the key in the file, the rule, what was given or meant."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dist_attn.model_config.registry import KindConfig

GIVEN_CHARACTERS = 80
PLAIN = {"missing": "it is missing", "extra_forbidden": "there is no such key; leave it out"}
"""The words for kinds of errors whose own speak of inputs and fields."""
WITHOUT_GIVEN = ("missing", "extra_forbidden", "value_error", "union_tag_invalid", "union_tag_not_found")


def refusal(error: ValidationError, values: Any) -> tuple[str, str]:
    """Find the key (empty: the whole) and the words of the first error in `values`, which were refused with `error`.

    Where a value may be of several types, the words are those of the type that it resembles most, or of all of them.
    """
    errors = error.errors(include_url=False, include_context=False)
    keys = [_key(one["loc"], values, missing=one["type"] == "missing") for one in errors]
    about_first = [key for key in keys if key[: len(keys[0])] == keys[0]]
    deepest = max(about_first, key=len)
    chosen = [one for one, key in zip(errors, keys, strict=True) if key == deepest]
    words = ", or ".join(
        dict.fromkeys(PLAIN.get(one["type"], one["msg"].removeprefix("Value error, ")) for one in chosen)
    )
    input_text = repr(chosen[0]["input"])
    if chosen[0]["type"] not in WITHOUT_GIVEN and len(input_text) <= GIVEN_CHARACTERS:
        words += f"; given is {input_text}"
    return ".".join(deepest), words


def _key(place: Sequence[int | str], values: Any, *, missing: bool) -> list[str]:
    """List the parts of a place that stand in the file; pydantic also names kinds and the members of unions."""
    parts = []
    for number, part in enumerate(place):
        inside = values if isinstance(values, Mapping) else dict(enumerate(values if isinstance(values, list) else ()))
        if part in inside:
            values = inside[part]
        elif not (missing and number == len(place) - 1):
            continue
        parts.append(str(part))
    return parts


Place = tuple[int | str, ...]
"""The place of an error as pydantic gives it: keys, and the kinds of sections between them."""


def key_of(config: type[BaseModel], place: Place, *, unknown: bool = False) -> str:
    """Name the key of a place as a file does; `unknown` for one whose last part is no key of `config`."""
    parts = [
        str(part)
        for number, (part, sections) in enumerate(_walk(config, place), 1)
        if any(part in section.model_fields for section in sections)
        or not any(_is_kind(section, part) for section in sections)
        or (unknown and number == len(place))
    ]
    return ".".join(parts)


def nearest_key(config: type[BaseModel], place: Place) -> str | None:
    """Find the key of `config` in the section of `place` that is most like its last part; None if none is."""
    *_, (unknown, sections) = _walk(config, place)
    names = sorted({name for section in sections for name in section.model_fields})
    return next(iter(get_close_matches(str(unknown), names, 1)), None)


def _walk(config: type[BaseModel], place: Place) -> Iterator[tuple[int | str, list[type[BaseModel]]]]:
    """Go through the parts of a place, with the sections in which each may be a key."""
    sections: list[type[BaseModel]] = [config]
    for part in place:
        yield part, sections
        inner = [
            kind for s in sections if part in s.model_fields for kind in _models(s.model_fields[str(part)].annotation)
        ]
        sections = inner or [s for s in sections if _is_kind(s, part)] or sections


def _models(annotation: Any) -> list[type[BaseModel]]:
    """List every configuration class in a type, however it is wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if issubclass(annotation, KindConfig) and "registry" in annotation.__dict__:
            return [*dict.fromkeys(entry.config for entry in annotation.registry.loaded().values())]
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _is_kind(section: type[BaseModel], kind: int | str) -> bool:
    field = section.model_fields.get("kind")
    return field is not None and kind in get_args(field.annotation)

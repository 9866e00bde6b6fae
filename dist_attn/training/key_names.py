"""Keys of a configuration: where an error stands, and which key may have been meant by one that does not exist."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

from dist_attn.model_config.mixer import MixerConfig, registered_mixers

__all__ = ["key_of", "nearest_key"]

Place = tuple[int | str, ...]
"""Where pydantic says that an error is: keys, and the kinds of sections between them."""


def key_of(config: type[BaseModel], place: Place, *, unknown: bool = False) -> str:
    """The key of a place as a file names it; `unknown` for one whose last part is no key of `config`."""
    parts = [
        str(part)
        for number, (part, sections) in enumerate(_walk(config, place), 1)
        if any(part in section.model_fields for section in sections)
        or not any(_is_kind(section, part) for section in sections)
        or (unknown and number == len(place))
    ]
    return ".".join(parts)


def nearest_key(config: type[BaseModel], place: Place) -> str | None:
    """The key of `config` in the section of `place` whose name is most like its last part; None if none is."""
    *_, (unknown, sections) = _walk(config, place)
    names = sorted({name for section in sections for name in section.model_fields})
    return next(iter(get_close_matches(str(unknown), names, 1)), None)


def _walk(config: type[BaseModel], place: Place) -> Iterator[tuple[int | str, list[type[BaseModel]]]]:
    """Every part of a place, with the sections in which it may be a key."""
    sections: list[type[BaseModel]] = [config]
    for part in place:
        yield part, sections
        inner = [
            kind for s in sections if part in s.model_fields for kind in _models(s.model_fields[str(part)].annotation)
        ]
        sections = inner or [s for s in sections if _is_kind(s, part)] or sections


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Every configuration in a type, however it is wrapped."""
    if annotation is MixerConfig:
        return [*dict.fromkeys(registered_mixers().values())]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _is_kind(section: type[BaseModel], kind: int | str) -> bool:
    field = section.model_fields.get("kind")
    return field is not None and kind in get_args(field.annotation)

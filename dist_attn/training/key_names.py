"""The key of a configuration that somebody may have meant by one that does not exist."""

from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

__all__ = ["nearest_key"]


def nearest_key(config: type[BaseModel], place: tuple[int | str, ...]) -> str | None:
    """The key of `config` in the section of `place` whose name is most like its last part; None if none is.

    `place` is as pydantic gives it: it also names the kinds of sections.
    """
    sections: list[type[BaseModel]] = [config]
    for part in place[:-1]:
        inner = [
            kind for s in sections if part in s.model_fields for kind in _models(s.model_fields[str(part)].annotation)
        ]
        sections = inner or [s for s in sections if _is_kind(s, part)] or sections
    names = sorted({name for section in sections for name in section.model_fields})
    return next(iter(get_close_matches(str(place[-1]), names, 1)), None)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Every configuration in a type, however it is wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _is_kind(section: type[BaseModel], kind: int | str) -> bool:
    field = section.model_fields.get("kind")
    return field is not None and kind in get_args(field.annotation)

"""Settings of a process that another of ours starts: written as flags by the one, read back by the other."""

import argparse
import json
from typing import Any, Self, get_args

from pydantic import ValidationError

from dist_attn.errors import ConfigError
from dist_attn.settings.tree import Section


class FlagSettings(Section):
    """A section of which every field is a flag: `start_deadline_s` is --start-deadline-s.

    Raises: ConfigError for values that do not fit.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_words(error)) from None

    def replace(self, **changes: Any) -> Self:
        """The same settings but for `changes`. Raises: ConfigError for values that do not fit."""
        return type(self)(**{**dict(self), **changes})

    def to_flags(self) -> list[str]:
        """The flags that are read back to an equal value; those of defaults are left out."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return [f"{_flag(name)}={_text(value)}" for name, value in values.items()]

    @classmethod
    def parser(cls, program: str, usage: str, description: str) -> argparse.ArgumentParser:
        """A parser with a flag for each field; it leaves values as they were typed, and None where none was."""
        parser = argparse.ArgumentParser(prog=program, usage=usage, description=description)
        for name, field in cls.model_fields.items():
            choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
            about = (field.description or "").replace("%", "%%")
            default = "needed" if field.is_required() else f"default: {field.default!r}"
            parser.add_argument(_flag(name), metavar="VALUE", choices=choices or None, help=f"{about} ({default})")
        return parser


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    """A value as `FlagSettings` reads it from a flag; lists and booleans are JSON."""
    return json.dumps(value) if isinstance(value, list | bool) else str(value)


def _words(error: ValidationError) -> str:
    """The first of the errors in words."""
    first = error.errors(include_url=False, include_context=False)[0]
    words = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return words
    name = first["loc"][0]
    if first["type"] == "missing":
        return f"{name} is not set; give {_flag(str(name))}, or see --help"
    return f"{name} is {first['input']!r:.80}: {words[:1].lower()}{words[1:]}"

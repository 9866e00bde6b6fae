"""The settings of a start: defaults, a TOML file, the environment and flags, and the origin of each value.

A process that another of ours starts gets its own as flags, and reads them back.
"""

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import ValidationError

from dist_attn.errors import ConfigError
from dist_attn.settings.tree import SECTIONS, Section, Settings, settings_keys


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
        """Copy the settings with `changes`. Raises: ConfigError for values that do not fit."""
        return type(self)(**{**dict(self), **changes})

    def to_flags(self) -> list[str]:
        """The flags that are read back to an equal value; default values have none."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return [f"{_flag(name)}={_text(value)}" for name, value in values.items()]

    @classmethod
    def parser(cls, program: str, usage: str, description: str) -> argparse.ArgumentParser:
        """Make a parser with a flag for each field; it leaves values as they were typed, and None where none was."""
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
    """Write a value as `FlagSettings` reads it from a flag; lists and booleans are JSON."""
    return json.dumps(value) if isinstance(value, list | bool) else str(value)


def _words(error: ValidationError) -> str:
    """Put the first of the errors in words."""
    first = error.errors(include_url=False, include_context=False)[0]
    words = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return words
    name = first["loc"][0]
    if first["type"] == "missing":
        return f"{name} is not set; give {_flag(str(name))}, or see --help"
    return f"{name} is {first['input']!r:.80}: {words[:1].lower()}{words[1:]}"


PREFIX = "DIST_ATTN_"
KEY = r"[\x21-\x7e]{1,512}"  # a client's key, as a header can carry it
CONFIG_VARIABLE = "DIST_ATTN_CONFIG"
CLIENT_VARIABLES = {"DIST_ATTN_API_KEY"}  # what commands with --url send; no setting of a service
# Kubernetes puts such names into every container beside a Service that is called dist-attn-something.
_SERVICE_LINK = re.compile(r".*(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT(_\d+_(TCP|UDP)(_[A-Z]+)?)?)")


@dataclass(frozen=True)
class Resolved:
    """The settings with the origin of each: "default", "file …", "environment …" or "flag …"."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """List key, value and origin of every setting, in the order of the tree; of keys only their number is told."""
        for key in settings_keys():
            value: Any = self.settings
            for name in key.split("."):
                value = getattr(value, name)
            yield key, _plain(key, value), self.origins.get(key, "default")


def read_settings(
    file: Path | None = None, *, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> Resolved:
    """Read the settings of a start: the file's over the defaults, the environment's over both, flags over all.

    `flags` are values by key; those that are None were not given. Without `file` DIST_ATTN_CONFIG may name one.
    Raises: ConfigError for a file that cannot be read, an unknown key or a value that is not accepted.
    """
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = [_from_file(file)] if file is not None else []
    sources += [_from_environment(environment), _from_flags(flags or {})]
    for source in sources:
        for key, (value, origin) in source.items():
            values[key], origins[key] = value, origin
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    try:
        return Resolved(Settings.model_validate(tree), origins)
    except ValidationError as error:
        raise _refused(error, origins) from None


_Source = dict[str, tuple[Any, str]]


def _from_file(path: Path) -> _Source:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not TOML: {error}") from None
    source: _Source = {}
    for name, value in tree.items():
        if value == {} and name not in SECTIONS:
            raise ConfigError(f"[{name}] in {path} is no section of the settings; there are {', '.join(SECTIONS)}")
        entries = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for key, item in entries.items():
            source[_known(key, f"{key} in {path}")] = (item, f"file {path}")
    return source


def _from_environment(environment: Mapping[str, str]) -> _Source:
    source: _Source = {}
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE or name in CLIENT_VARIABLES:
            continue
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        if key not in settings_keys() and _SERVICE_LINK.fullmatch(name):
            continue
        source[_known(key, f"{name} in the environment")] = (value, f"environment {name}")
    return source


def _from_flags(flags: Mapping[str, Any]) -> _Source:
    values = {key: value for key, value in flags.items() if value is not None}
    return {key: (value, f"flag --{key.rpartition('.')[2].replace('_', '-')}") for key, value in values.items()}


def _known(key: str, where: str) -> str:
    keys = settings_keys()
    if key in keys:
        return key
    by_name = [known for known in keys if known.rpartition(".")[2] == key.rpartition(".")[2]]
    near = by_name or difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {near[0]}?" if near else "`dist-attn config show` lists all"
    raise ConfigError(f"{where} is no setting; {hint}")


def _refused(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"]]
    key = next((".".join(path[:n]) for n in (2, 1) if ".".join(path[:n]) in settings_keys()), ".".join(path))
    shown = "a value that is not shown" if _is_secret(key) else repr(first["input"])[:80]
    words = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key} ({origins.get(key, 'given')}) is {shown}: {words[:1].lower()}{words[1:]}")


def _is_secret(key: str) -> bool:
    return key in ("http.api_keys", "http.admin_keys")


def _plain(key: str, value: Any) -> Any:
    """Convert a value to the form that JSON and people read."""
    if _is_secret(key):
        return f"{len(value)} keys"
    if key in ("store.address", "store.blobs", "jobs.address", "files.catalogue"):
        return re.sub(r"//[^/]*@", "//…@", value)
    return str(value) if isinstance(value, Path) else value


def read_keys(file: Path) -> list[str]:
    """Read the keys in a file of clients' keys: one per line, but for empty ones and those that begin with #.

    Raises: ConfigError for a file that cannot be read, that holds no key, or one that cannot be sent.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError as error:
        raise ConfigError(f"the file of keys {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the file of keys {file} holds more than ASCII, which no header can carry") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"the file of keys {file} holds no key; write one per line, or leave the setting out")
    for number, key in enumerate(keys, start=1):
        if not re.fullmatch(KEY, key):
            raise ConfigError(
                f"key {number} in {file} holds a space or a control character, or more than 512 characters: no "
                "client could send it; write one key per line"
            )
    return keys

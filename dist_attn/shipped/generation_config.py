"""The facts in a model folder's generation_config.json on texts that the model writes; never imports torch."""

from pathlib import Path
from typing import Any, Final

import msgspec

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.folder_files import find_json_object
from dist_attn.wire.specs import MOST_END_TOKENS

__all__ = ["GENERATION_FILE", "GenerationDefaults", "read_generation_defaults"]

GENERATION_FILE: Final = "generation_config.json"
_NUMBERS: Final = {
    "temperature": (0.0, float("inf")), "top_p": (0.0, 1.0), "top_k": (0, 1 << 31), "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}  # fmt: skip


class GenerationDefaults(msgspec.Struct, frozen=True):
    """The tokens each of which ends a text, the strings that end a chat's answer, and how tokens are drawn by default.

    None: the folder does not say so either. `do_sample` false is temperature 0, and of the rest the penalty counts.
    """

    end_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def sampling(self) -> dict[str, float | int]:
        """The folder's defaults of drawing, by the names of `SamplingSpec`."""
        named = {name: getattr(self, name) for name in _NUMBERS}
        return {name: value for name, value in named.items() if value is not None}


def read_generation_defaults(folder: Path, vocab_size: int) -> GenerationDefaults:
    """Read the defaults in generation_config.json; end tokens that it does not name are those of config.json.

    Raises: ModelFolderError naming the file, the value, and what is needed.
    """
    path, config = folder / GENERATION_FILE, folder / "config.json"
    about, values = find_json_object(path) or {}, find_json_object(config) or {}
    text = values.get("text_config")
    ends: tuple[int, ...] = ()
    for file, where in ((path, about), (config, values), (config, text if isinstance(text, dict) else {})):
        if where.get("eos_token_id") is not None:
            ends = _end_tokens(file, where["eos_token_id"], vocab_size)
            break
    numbers = {name: _number(path, name, about.get(name)) for name in _NUMBERS}
    if numbers["top_p"] == 0:
        raise ModelFolderError(f"{path}: top_p is 0; needed is a number above 0 and at most 1, or none")
    stops = _stop_strings(path, about.get("stop_strings"))
    if about.get("do_sample") is False:
        return GenerationDefaults(ends, stops, temperature=0.0, repetition_penalty=numbers["repetition_penalty"])
    return GenerationDefaults(ends, stops, **numbers)


def _end_tokens(path: Path, value: Any, vocab_size: int) -> tuple[int, ...]:
    ends = value if isinstance(value, list) else [value]
    for end in ends:
        if type(end) is not int or not 0 <= end < vocab_size:
            raise ModelFolderError(f"{path}: eos_token_id is {end!r}; needed is a token below {vocab_size}")
    if len(ends) > MOST_END_TOKENS:
        raise ModelFolderError(f"{path}: eos_token_id has {len(ends)} tokens; needed are at most {MOST_END_TOKENS}")
    return tuple(dict.fromkeys(ends))


def _stop_strings(path: Path, value: Any) -> tuple[str, ...]:
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ModelFolderError(f"{path}: stop_strings is {value!r}; needed are texts that are not empty, or none")
    return tuple(stops)


def _number(path: Path, name: str, value: Any) -> Any:
    least, most = _NUMBERS[name]
    fits = isinstance(value, int) or (isinstance(value, float) and isinstance(least, float))
    if value is not None and (not fits or isinstance(value, bool) or not least <= value <= most):
        raise ModelFolderError(f"{path}: {name} is {value!r}; needed is a number from {least:g} to {most:g}, or none")
    return value

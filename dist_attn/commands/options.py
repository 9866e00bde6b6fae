"""Options that several commands have, and what is refused beside one of them."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from dist_attn.errors import InputError
from dist_attn.wire import choices
from dist_attn.wire.specs import SamplingSpec

__all__ = [
    "AsJson",
    "Config",
    "DataDir",
    "Host",
    "Model",
    "Port",
    "Ranks",
    "StateExchange",
    "Url",
    "Weights",
    "DrawingSettings",
    "leave_to_service",
    "sampling_spec",
]

Config = Annotated[Path | None, typer.Option(help="A TOML file with settings.")]
Model = Annotated[str | None, typer.Option(help="A model folder, or a name that `dist-attn models` lists.")]
Ranks = Annotated[int, typer.Option(help="Processes that share each document.", min=1, max=1024)]
StateExchange = Annotated[
    choices.StateExchange,
    typer.Option(
        help="How processes that share a text hand on what they have read; auto takes what was measured fastest."
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")]
Port = Annotated[int | None, typer.Option(help="Port to listen on (default: 8000).", min=1, max=65535)]
DataDir = Annotated[
    Path | None, typer.Option(help="Where uploads and states are kept (default: dist-attn in your data folder).")
]
Url = Annotated[str | None, typer.Option(help="Let this service do it (a key goes into DIST_ATTN_API_KEY).")]
Weights = Annotated[choices.WeightPrecision, typer.Option(help="How the model's weights lie in memory.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object in place of text for people.")]


_WITH_FLAGS = {"max_tokens", "temperature", "top_k", "top_p", "seed"}
_OF_ANSWERS = {"logprobs", "prompt_logprobs"}  # this command prints none
_RARE = [name for name in SamplingSpec.__struct_fields__ if name not in _WITH_FLAGS | _OF_ANSWERS]
DrawingSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help=f"Set a rarer option of drawing: {', '.join(_RARE)}; repeatable."),
]


def sampling_spec(assignments: list[str] | None, **flags: Any) -> SamplingSpec:
    """How tokens are drawn, as flags and KEY=VALUE say; a value is JSON.

    Raises: InputError for another key, and for a value that is not of its kind.
    """
    rare: dict[str, Any] = {}
    for assignment in assignments or ():
        key, _, text = assignment.partition("=")
        if key not in _RARE:
            raise InputError(f"--set {assignment[:80]}: {key!r} is no option of drawing; there are {', '.join(_RARE)}")
        try:
            alone = {"max_tokens": 1, key: msgspec.json.decode(text)}
            rare[key] = getattr(msgspec.convert(alone, SamplingSpec, str_keys=True), key)
        except msgspec.MsgspecError as error:
            raise InputError(f"--set {assignment[:80]} cannot be used: {error}") from None
    return SamplingSpec(**flags, **rare)


def leave_to_service(**flags: bool) -> None:
    """Raises: InputError for flags that say how it is done here."""
    for name in (name for name, is_set in flags.items() if is_set):
        raise InputError(f"--{name} and --url were given; how a service does its work is its own choice: leave one out")

"""Options that several commands have, and what is refused beside one of them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dist_attn.errors import InputError
from dist_attn.wire.choices import WeightPrecision

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
    "leave_to_service",
]

Config = Annotated[Path | None, typer.Option(help="A TOML file with settings.")]
Model = Annotated[str | None, typer.Option(help="A model folder, or a name that `dist-attn models` lists.")]
Ranks = Annotated[int, typer.Option(help="Processes that share each document.", min=1, max=1024)]
StateExchange = Annotated[
    Literal["auto", "pair", "gather", "exscan", "log_step", "two_level", "pipelined_ring", "serial_ring"],
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
Weights = Annotated[WeightPrecision, typer.Option(help="How the model's weights lie in memory.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object in place of text for people.")]


def leave_to_service(**given: bool) -> None:
    """Raises: InputError for flags that say how it is done here."""
    for name in (name for name, is_given in given.items() if is_given):
        raise InputError(f"--{name} and --url were given; how a service does its work is its own choice: leave one out")

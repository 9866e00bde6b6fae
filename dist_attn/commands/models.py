"""`dist-attn models [FOLDER…]`: the models that ship, or those in folders; never loads torch."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_attn.commands.options import AsJson

__all__ = ["models"]


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Model folders; without any, the models that ship.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List models that --model takes: those that ship, or those in folders, with their size and what they are for.

    Example: dist-attn models

    Example: dist-attn models runs/first/model
    """
    from dist_attn.commands.tables import byte_size, stdout_console
    from dist_attn.costs import model_kind
    from dist_attn.shipped import DEFAULT_MODEL, purpose, resolve_model_folder, shipped_models

    found = [resolve_model_folder(folder) for folder in folders] if folders else shipped_models()
    described: list[dict[str, Any]] = [
        {
            "name": str(folder) if folders else folder.name,
            "kind": model_kind(folder),
            "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            "default": not folders and folder.name == DEFAULT_MODEL,
            "purpose": purpose(folder),
        }
        for folder in found
    ]
    if as_json:
        print(json.dumps({"object": "list", "data": described}))
        return
    console = stdout_console()
    for one in described:
        default = ", taken where no --model is given" if one["default"] else ""
        console.print(f"{one['name']}  {one['kind']}, {byte_size(one['bytes'])}{default}", soft_wrap=True, markup=False)
        console.print(f"    {one['purpose'] or 'no README.md says what it is for'}", soft_wrap=True, markup=False)

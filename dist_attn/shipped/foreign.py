"""Whether a folder holds a model of Hugging Face's that was not converted; never imports torch."""

import json
from pathlib import Path
from typing import Any, Final

from dist_attn.errors import ModelFolderError

__all__ = ["CONVERTIBLE", "OUR_MODEL_TYPE", "refuse_foreign"]

OUR_MODEL_TYPE: Final = "dist_attn"
CONVERTIBLE: Final = ("bert", "gpt2", "gpt_neox", "llama")
"""The values of `model_type` that `dist-attn convert` reads."""


def refuse_foreign(folder: Path) -> None:
    """Nothing happens where config.json is one of this project, is damaged or is missing: its reader says so.

    Raises: ModelFolderError for a model of Hugging Face's, with its type and the command that converts it.
    """
    values = _read(folder / "config.json")
    encoder = (folder / "modules.json").is_file()  # sentence-transformers; the configuration may lie deeper
    if not encoder and (not values.keys() & {"model_type", "architectures"} or values.keys() & {"kind", "mixer"}):
        return
    kind, names = values.get("model_type"), values.get("architectures")
    if kind == OUR_MODEL_TYPE:
        return
    said = [f"model_type {kind!r}"] if kind is not None else []
    said += [f"architectures {names!r}"] if names else []
    about = f" ({', '.join(said)})" if said else ""
    if encoder or kind in CONVERTIBLE:
        todo = f"make it a model folder of this project: dist-attn convert {folder} --out NEW_FOLDER"
    else:
        todo = f"dist-attn convert makes model folders of the types {', '.join(CONVERTIBLE)}"
    raise ModelFolderError(f"{folder} is a Hugging Face folder{about}; {todo}")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}

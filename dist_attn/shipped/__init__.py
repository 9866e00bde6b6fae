"""The models that ship with the package, and how a model is found by path or by name; never imports torch."""

from pathlib import Path

from dist_attn.errors import ModelFolderError

__all__ = ["DEFAULT_MODEL", "default_model_folder", "resolve_model_folder"]

SHIPPED = Path(__file__).parent
DEFAULT_MODEL = "books-6m"


def default_model_folder() -> Path:
    """The folder of the model that is used when none is named."""
    return SHIPPED / DEFAULT_MODEL


def resolve_model_folder(path_or_name: str | Path | None = None) -> Path:
    """A model folder by path, or a shipped model by name; None is the default one.

    Raises: ModelFolderError when there is neither, naming what was looked for and what ships.
    """
    wanted = DEFAULT_MODEL if path_or_name is None else str(path_or_name)
    for folder in (Path(wanted), SHIPPED / wanted):
        if (folder / "config.json").is_file():
            return folder
    ships = sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))
    raise ModelFolderError(
        f"no model at {wanted!r}: needed is a folder with config.json, model.safetensors and tokenizer.json, or the "
        f"name of a shipped model ({', '.join(ships) or 'none here'})"
    )

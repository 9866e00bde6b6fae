"""The models that ship with the package, and how a model is found by path or by name; never imports torch."""

from pathlib import Path

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.foreign import refuse_foreign

__all__ = ["DEFAULT_MODEL", "SHIPPED", "default_model_folder", "purpose", "resolve_model_folder", "shipped_models"]

SHIPPED = Path(__file__).parent
DEFAULT_MODEL = "books-6m"


def default_model_folder() -> Path:
    """The folder of the model that is used when none is named."""
    return SHIPPED / DEFAULT_MODEL


def shipped_models() -> list[Path]:
    """The folders of the models that ship, the default one first."""
    folders = (path.parent for path in SHIPPED.glob("*/config.json"))
    return sorted(folders, key=lambda folder: (folder.name != DEFAULT_MODEL, folder.name))


def purpose(folder: Path) -> str:
    """What a model is for: the first paragraph of its README.md; "" without one."""
    try:
        paragraphs = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")
    except (OSError, UnicodeDecodeError):
        return ""
    return next(
        (" ".join(part.split()) for part in paragraphs if part.strip() and not part.startswith(("#", "---"))), ""
    )


def resolve_model_folder(path_or_name: str | Path | None = None) -> Path:
    """A model folder by path, or a shipped model by name; None is the default one.

    Raises: ModelFolderError when there is neither, naming what was looked for and what ships; and for a folder of
        Hugging Face's that was not converted.
    """
    wanted = DEFAULT_MODEL if path_or_name is None else str(path_or_name)
    for folder in (Path(wanted), SHIPPED / wanted):
        refuse_foreign(folder)
        if (folder / "config.json").is_file():
            return folder
    ships = sorted(folder.name for folder in shipped_models())
    raise ModelFolderError(
        f"no model at {wanted!r}: needed is a folder with config.json, model.safetensors and tokenizer.json, or the "
        f"name of a shipped model ({', '.join(ships) or 'none here'})"
    )

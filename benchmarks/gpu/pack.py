"""Makes this tree ready for a machine that is lent for minutes, has torch but no network, and takes so many MiB.

    python -m benchmarks.gpu.pack [--kernels FOLDER]    in a clone with nothing uncommitted
    python -m benchmarks.gpu.pack undo

Into `.gpu`, which git ignores, come wheels of what the machine may lack, the newest assembler of Triton's kernels,
kernels compiled beforehand (a cache of Triton's), and the commit. Weights that `make gpu` does not read stay behind:
they are moved into git's own folder, empty files stand in their places, and git is told not to look at these, so that
no commit can lose them.
"""

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.setting import ROOT, look_around

__all__ = ["bring_back", "leave_behind", "main", "travelling"]

MIB = 1 << 20
PACKED = ".gpu"
# Where torch is, these are or need not be: scipy, whose wheel has 35 MiB, is for redistributions and attention models.
THERE = ("torch", "numpy", "scipy")
CASES = ("transformers", "pytest", "psutil")  # what cases import; transformers before 5.23 lacks what some models need
EXTRA = ("fla-core", "einops")  # without what fla-core needs, which is torch and triton
OFFLINE = "hf_xet"  # a network is all that it is for
ASSEMBLER = "nvidia-cuda-nvcc>=13.3"  # of whose 45 MiB one program is needed
STAYS = "dist_attn/shipped/*/model.safetensors"
READ = "dist_attn/shipped/books-6m/model.safetensors"
# pip takes a platform by its exact name.
GLIBC = ("_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014", "1")


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 where more would travel than the machine takes, 2 where it cannot be packed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("pack", "undo"), default="pack")
    parser.add_argument("--python", default="3.12", help="that of the machine (default: %(default)s)")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="a cache of Triton's to bring along")
    parser.add_argument("--mib", type=float, default=64.0, help="what the machine takes (default: %(default)g)")
    options = parser.parse_args(arguments)
    try:
        return _pack(options) if options.what == "pack" else _undo()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 2


def _undo() -> int:
    for path in bring_back(ROOT):
        print(f"back: {path}")
    shutil.rmtree(ROOT / PACKED, ignore_errors=True)
    return 0


def _pack(options: argparse.Namespace) -> int:
    packed = ROOT / PACKED
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir()
    with tempfile.TemporaryDirectory() as wheels:
        fetch_wheels(Path(wheels), options.python)
        pack_wheels(Path(wheels), packed / "wheels.tar.xz")
    if options.kernels is not None:
        pack_kernels(options.kernels, packed / "triton.tar.xz")
    pack_assembler(packed)
    commit = look_around().commit
    (packed / "commit").write_text(f"{commit}\n")
    for path in leave_behind(ROOT):
        print(f"stays behind: {path}")
    tree, beside = _mib(travelling(ROOT)), _mib(file for file in packed.rglob("*") if file.is_file())
    print(
        f"travels, of commit {commit}: {tree:.1f} MiB of the tree and {beside:.1f} MiB in {PACKED}, which git ignores"
    )
    print(f"in all {tree + beside:.1f} MiB of {options.mib:g}; bring all back with: python -m benchmarks.gpu.pack undo")
    return 0 if tree + beside <= options.mib else 1


def fetch_wheels(folder: Path, python: str) -> None:
    """Those of dist-attn's requirements and of `CASES`, in the versions of constraints.txt, and of `EXTRA`.

    Raises: subprocess.CalledProcessError where pip cannot have them; it says why.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [one for one in project["dependencies"] if not one.startswith(THERE)]
    for more in ([*needed, *CASES], ["--no-deps", *EXTRA]):
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
                *("--only-binary=:all:", f"--python-version={python}", "--implementation=cp", f"--dest={folder}"),
                *(f"--platform=manylinux{glibc}_x86_64" for glibc in GLIBC),
                *("--constraint", str(ROOT / "constraints.txt"), *more),
            ],
            check=True,
        )


def pack_wheels(folder: Path, archive: Path) -> None:
    """All in one archive, each without a compression of its own: so they take half the room together."""
    with tarfile.open(archive, "w:xz") as tar:
        for wheel in sorted(folder.glob("*.whl")):
            if wheel.name.startswith((*THERE, OFFLINE)):
                continue
            stored = wheel.with_suffix(".stored")
            with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(stored, "w") as after:
                for one in before.infolist():
                    after.writestr(one.filename, before.read(one))
            tar.add(stored, wheel.name)


def pack_assembler(folder: Path) -> None:
    """Fetch the newest ptxas, packed.

    Raises: subprocess.CalledProcessError where pip cannot have it; ValueError where the package has none.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", f"--dest={name}", ASSEMBLER], check=True)
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            inside = next((one for one in wheel.namelist() if one.endswith("/bin/ptxas")), None)
            if inside is None:
                raise ValueError(f"{wheel.filename} has no ptxas")
            (folder / "ptxas.xz").write_bytes(lzma.compress(wheel.read(inside)))


def pack_kernels(cache: Path, archive: Path) -> None:
    """What Triton would compile: programs of the GPU and what it knows of them, without the steps in between.

    Raises: ValueError where there are none.
    """
    if not any(cache.glob("*/*.cubin")):
        raise ValueError(
            f"{cache} holds no kernels: needed is a folder that TRITON_CACHE_DIR named while they were compiled"
        )
    with tarfile.open(archive, "w:xz") as tar:
        for file in sorted(cache.glob("*/*")):
            if file.suffix in (".cubin", ".json"):
                tar.add(file, file.relative_to(cache))


def leave_behind(root: Path) -> list[str]:
    """Put aside the weights that no piece of the check reads; their paths.

    Raises: ValueError for weights that are not in a commit as they are.
    """
    aside, found = _aside(root), []
    for path in sorted(root.glob(STAYS)):
        name = str(path.relative_to(root))
        if name == READ or not path.stat().st_size:
            continue
        if _git(root, "hash-object", name).strip() not in _git(root, "ls-tree", "HEAD", "--", name).split():
            raise ValueError(f"{name} is not committed as it is: commit it, or put it elsewhere, and pack again")
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, aside / name)
        path.touch()
        _git(root, "update-index", "--skip-worktree", "--", name)
        found.append(name)
    return found


def bring_back(root: Path) -> list[str]:
    """Undo `leave_behind`; the paths that came back.

    Raises: FileExistsError where something else stands in a file's place by now; both are kept.
    """
    aside, found = _aside(root), []
    for path in sorted(file for file in aside.rglob("*") if file.is_file()):
        name = str(path.relative_to(aside))
        if (root / name).exists() and (root / name).stat().st_size:
            raise FileExistsError(f"{name} is no longer empty: keep it or {path}, by removing the other, and try again")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, root / name)
        _git(root, "update-index", "--no-skip-worktree", "--", name)
        found.append(name)
    shutil.rmtree(aside, ignore_errors=True)
    return found


def travelling(root: Path) -> list[Path]:
    """Files of the tree: those that git knows, and those that it does not ignore."""
    names = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [root / name for name in sorted(set(names)) if name and os.path.lexists(root / name)]


def _aside(root: Path) -> Path:
    """In the folder that git has for this checkout, where no command of git looks."""
    return (root / _git(root, "rev-parse", "--git-path", "left-behind").strip()).resolve()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=60.0)
    return done.stdout


def _mib(files: Iterable[Path]) -> float:
    return sum(file.lstat().st_size for file in files) / MIB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

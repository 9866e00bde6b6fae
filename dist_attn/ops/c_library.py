"""C kernels of this package: compiled once on the machine they run on, for exactly its processor, and loaded.

Sources travel in the package; what was compiled is kept among the user's cached files under a name that says what it
was made of. A machine without a compiler has none, and is told why.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from dist_attn.ops.cache_folder import cache_folder

__all__ = ["NoLibraryError", "load_library"]

COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0
# No errno and no floating-point traps: nothing here looks at them. NaN and infinities keep their meaning.
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")


class NoLibraryError(Exception):
    """There are no kernels on this machine; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class _Result:
    library: ctypes.CDLL | None
    why_not: str


def load_library(source: Path) -> ctypes.CDLL:
    """The functions of a C file (which may include others beside it), compiled when they have not been here before.

    Raises: NoLibraryError, every time, where they cannot be compiled or loaded.
    """
    result = _loaded(source)
    if result.library is None:
        raise NoLibraryError(result.why_not)
    return result.library


@lru_cache(maxsize=16)
def _loaded(source: Path) -> _Result:
    try:
        return _Result(ctypes.CDLL(str(_compiled(source))), "")
    except NoLibraryError as error:
        return _Result(None, str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return _Result(None, f"the C kernels could not be compiled or loaded: {error}")


def _compiled(source: Path) -> Path:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoLibraryError(f"there is no C compiler ({', '.join(COMPILERS)}) to compile the kernels with")
    command = [compiler, *FLAGS, _for_this_processor(), str(source), *_torch_threads(), "-lm"]
    texts = sorted(file for file in source.parent.iterdir() if file.suffix in (".c", ".h"))
    made_of = (*command, _version(compiler), _processor(), *(file.read_text() for file in texts))
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:20]
    folder = _private_folder()
    library = folder / f"{source.stem}-{digest}.so"
    if not library.exists():
        # Ranks that start together all compile; each puts a whole file in place.
        beside = folder / f".{library.name}.{os.getpid()}"
        try:
            _run([*command, "-o", str(beside)])
            beside.replace(library)
        finally:
            beside.unlink(missing_ok=True)
    return library


def _private_folder() -> Path:
    """Where libraries lie: nobody but this user may write there, since what lies there is run."""
    folder = cache_folder(os.environ) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="dist-attn-kernels-"))


def _for_this_processor() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _torch_threads() -> list[str]:
    """torch's own copy of the OpenMP library, where it brings one: two pools of threads would wait for each other."""
    package = Path(torch.__file__).parent
    found = (*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*"))
    return [str(found[0])] if found else []


def _processor() -> str:
    """Names the processor: a home folder may be seen by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMPILE_S,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise NoLibraryError(f"{Path(command[0]).name} cannot compile the kernels here: {said}")
    return done.stdout

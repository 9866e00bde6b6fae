"""C kernels of this package: compiled once on the machine they run on, for exactly its processor, and loaded.

Sources travel in the package; what was compiled is kept among the user's cached files under a name that says what it
was made of. A machine without a compiler has none, and is told why.
"""

import contextlib
import ctypes
import fcntl
import grp
import hashlib
import os
import platform
import pwd
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

COMPILERS = ("cc", "gcc", "clang")
COMPILE_S = 120.0
MOST_KEPT = 8  # compiled versions of one source: for processors that share a home folder, and for older code
# No errno and no floating-point traps: nothing here looks at them. NaN and infinities keep their meaning.
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
DIGEST = 32  # bytes

_one_at_a_time = threading.Lock()  # threads that start together wait for the one that compiles


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
    with _one_at_a_time:
        result = _loaded(source)
    if result.library is None:
        raise NoLibraryError(result.why_not)
    return result.library


@lru_cache(maxsize=16)
def _loaded(source: Path) -> _Result:
    try:
        folder = _private_folder()
        if folder is not None:
            return _Result(_library_in(folder, source), "")
        # What is loaded stays loaded when its file is gone.
        with tempfile.TemporaryDirectory(prefix="dist-attn-kernels-") as temporary:
            folder = Path(temporary).resolve()
            if (place := changed_by_others(folder)) is not None:
                raise NoLibraryError(
                    f"the C kernels have no safe place: other users can exchange what lies in {place}; "
                    "set XDG_CACHE_HOME or TMPDIR to a folder that only you can write to"
                )
            return _Result(_library_in(folder, source), "")
    except NoLibraryError as error:
        return _Result(None, str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return _Result(None, f"the C kernels could not be compiled or loaded: {error}")


def _library_in(folder: Path, source: Path) -> ctypes.CDLL:
    """Load the library from this folder; compile it there if there is none, or none that can be loaded."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoLibraryError(f"there is no C compiler ({', '.join(COMPILERS)}) to compile the kernels with")
    options, libraries = [compiler, *FLAGS, _for_this_processor()], [*_torch_threads(), "-lm"]
    command = [*options, str(source), *libraries]
    texts = sorted(file for file in source.parent.iterdir() if file.suffix in (".c", ".h"))
    # Wherever the source lies: other copies of the package find what was compiled for one.
    made_of = (*options, *libraries, _version(compiler), _processor(), *(file.read_text() for file in texts))
    library = folder / f"{source.stem}-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:20]}.so"
    if (there := _kept(library)) is not None:
        return there
    with _alone_in(folder):
        if (there := _kept(library)) is not None:  # another process made it meanwhile
            return there
        _compile(command, library)
    return ctypes.CDLL(str(library))


def _kept(library: Path) -> ctypes.CDLL | None:
    """The library, unless it is not whole or was made where other libraries were."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(library)) if _is_whole(library) else None
    return None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for other processes that compile into this folder, as long as one may take, where its file system can."""
    deadline, descriptor = time.monotonic() + COMPILE_S, os.open(folder, os.O_RDONLY)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _compile(command: Sequence[str], library: Path) -> None:
    # Processes that did not wait for each other may both compile; each puts a whole file in place.
    beside = library.parent / f".{library.name}.{os.getpid()}"
    try:
        _run([*command, "-o", str(beside)])
        with beside.open("r+b") as file:
            made = file.read()
            file.write(hashlib.sha256(made).digest())
        beside.replace(library)
    finally:
        beside.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process may remove it at the same time
        _forget_old(library.parent, library.name.rpartition("-")[0])


def _forget_old(folder: Path, stem: str) -> None:
    """Keeps the newest versions; what is loaded stays loaded when its file is gone."""
    kept = sorted(folder.glob(f"{stem}-*.so"), key=lambda file: file.stat().st_mtime)
    for old in kept[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def _is_whole(library: Path) -> bool:
    """Return whether the file is whole, by the digest at its end: loading one that is cut short kills the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _private_folder() -> Path | None:
    """The folder of libraries, or None: only this user and root may change its files, since they are run."""
    folder = cache_folder(os.environ) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = folder.resolve()
        if changed_by_others(folder) is None and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return None


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


NOBODY = 65534  # what Linux shows as the owner where a user namespace does not know the real one


def cache_folder(environ: Mapping[str, str]) -> Path:
    """dist-attn in $XDG_CACHE_HOME, else in ~/.cache; for a user without a home, among temporary files."""
    cache = environ.get("XDG_CACHE_HOME")
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    if not cache and not home.is_absolute():
        return Path(tempfile.gettempdir()) / f"dist-attn-{os.getuid()}"
    return (Path(cache) if cache else home / ".cache") / "dist-attn"


def changed_by_others(folder: Path) -> Path | None:
    """The first folder on the way up from this one in which another user than root could put things, or exchange them.

    `folder` is resolved: it holds no symbolic links. A shared folder with the sticky bit, such as /tmp, is safe to pass
    through, since only owners may rename what lies in it, but not to put things into.

    Raises: OSError where one of them cannot be looked at.
    """
    for place in (folder, *folder.parents):
        found = place.stat()
        if found.st_uid not in _trusted_owners():
            return place
        others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid))
        if others and (place == folder or not found.st_mode & stat.S_ISVTX):
            return place
    return None


def _trusted_owners() -> set[int]:
    trusted = {0, os.getuid()}
    try:
        maps = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return trusted
    # Without a user of that number in this namespace, it stands for the host's root, who owns what lies above.
    known = any(first <= NOBODY < first + count for first, _, count in maps)
    return trusted if known else trusted | {NOBODY}


def _own_group(group: int) -> bool:
    """Return whether the group is this user's private one, which many systems make for each user."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False

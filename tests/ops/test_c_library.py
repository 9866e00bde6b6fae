"""C kernels are compiled once where they run, kept where nobody else writes, and absent with a reason."""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dist_attn.errors import ConfigError
from dist_attn.ops import c_library, linear_attention
from dist_attn.ops.c_call import kernels_of
from dist_attn.ops.c_library import COMPILERS, NoLibraryError, load_library
from dist_attn.ops.linear_attention import LinearCall, choose, implementation
from dist_attn.ops.linear_attention.native_call import NativeCall
from tests.support.native import needs_kernels

X = torch.ones(1, 2, 3, 4)
ANOTHER = 65534  # a user of every system: nobody


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small C file, libraries kept below the test's folder, and nothing loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "answer.h").write_text("#define ANSWER 42\n")
    file = tmp_path / "sources" / "answer.c"
    file.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    c_library._loaded.cache_clear()
    yield file
    c_library._loaded.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """The commands that were run to compile, in order."""
    commands = []
    run = c_library._run
    monkeypatch.setattr(
        c_library, "_run", lambda command: ("-o" in command and commands.append(command)) or run(command)
    )
    return commands


def kept(tmp_path: Path) -> list[Path]:
    """Everything in the folder where libraries are kept."""
    return sorted((tmp_path / "cache" / "dist-attn" / "kernels").iterdir())


def program(folder: Path, text: str, name: str = "cc") -> None:
    """A program of that name, a shell script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@needs_kernels
def test_what_was_compiled_is_kept_and_found_again(source, compiled, tmp_path):
    """A second process and a copy of the source do not compile, a changed header does; only the user may write."""
    assert load_library(source).answer() == 42
    c_library._loaded.cache_clear()
    assert load_library(source).answer() == 42
    c_library._loaded.cache_clear()
    assert load_library(shutil.copytree(source.parent, tmp_path / "copy") / source.name).answer() == 42
    assert len(compiled) == 1
    (library,) = kept(tmp_path)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    c_library._loaded.cache_clear()
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    assert load_library(source).answer() == 43
    assert len(compiled) == 2


@needs_kernels
@pytest.mark.parametrize("damage", ["cut short", "empty", "other bytes", "whole, but not a library"])
def test_a_damaged_library_is_compiled_once_more(source, compiled, tmp_path, damage, monkeypatch):
    """A file that is not what was written is replaced, and never loaded: that could kill the process."""
    load_library(source)
    (library,) = kept(tmp_path)
    whole = library.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut short": whole[:middle],
        "empty": b"",
        "other bytes": whole[:middle] + b"x" * 64 + whole[middle + 64 :],
        "whole, but not a library": b"x" * 99 + hashlib.sha256(b"x" * 99).digest(),
    }
    # Elsewhere: a process that has loaded a path once is given the same again.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second" / "cache"))
    library = tmp_path / "second" / library.relative_to(tmp_path)
    library.parent.mkdir(parents=True, mode=0o700)
    library.write_bytes(damaged[damage])
    c_library._loaded.cache_clear()
    assert load_library(source).answer() == 42
    assert len(compiled) == 2
    assert kept(tmp_path / "second") == [library]
    assert library.read_bytes()[:4] == b"\x7fELF"


@needs_kernels
def test_threads_that_start_together_compile_once(source, compiled):
    """Ranks as threads get one library, whoever is first."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: load_library(source).answer(), range(8)))
    assert answers == [42] * 8
    assert len(compiled) == 1


@needs_kernels
def test_processes_that_start_together_compile_once(source, tmp_path):
    """Each of two processes gets a whole library, one of them made it, and one file is left."""
    text = (
        "from pathlib import Path; from dist_attn.ops import c_library; run = c_library._run; "
        "c_library._run = lambda command: ('-o' in command and print('compiles')) or run(command); "
        f"print(c_library.load_library(Path({str(source)!r})).answer())"
    )
    processes = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sorted(printed) == [["42"], ["compiles", "42"]]
    assert len(kept(tmp_path)) == 1


def test_a_process_that_stands_still_is_not_waited_for_forever(tmp_path, monkeypatch):
    """Whoever holds the folder for longer than a compiler may take is passed by."""
    monkeypatch.setattr(c_library, "COMPILE_S", 0.1)
    holder, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    fcntl.flock(holder, fcntl.LOCK_EX)
    with c_library._alone_in(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is still held
    os.close(holder)
    os.close(other)


def test_where_folders_cannot_be_locked_nobody_waits(tmp_path, monkeypatch):
    """As on some file systems of networks, whose error is another than that of a lock that is held."""
    asked = []

    def refuse(descriptor, operation):
        asked.append(operation)
        raise OSError(errno.EBADF, "no locks here")

    monkeypatch.setattr(c_library.fcntl, "flock", refuse)
    with c_library._alone_in(tmp_path):
        assert len(asked) == 1


@needs_kernels
@pytest.mark.parametrize(
    "why",
    ["others may write", "others may write above", "another's", "another's above", "not a folder", "nobody may write"],
)
def test_where_nothing_can_be_kept_nothing_is_left_behind(source, tmp_path, why):
    """A folder that is not the user's alone is not used: the library is made in a temporary one, which is removed."""
    folder = tmp_path / "cache" / "dist-attn" / "kernels"
    folder.parent.mkdir(parents=True)
    if why == "not a folder":
        folder.write_text("")
    else:
        folder.mkdir()
        place = folder.parents[1] if "above" in why else folder
        if "another's" in why:
            if os.getuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(place, ANOTHER, ANOTHER)
        else:
            place.chmod(0o777 if "others" in why else 0o500)
    if why == "nobody may write" and os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    assert load_library(source).answer() == 42
    assert not list((tmp_path / "temporary").iterdir())
    assert why == "not a folder" or not list(folder.iterdir())


@needs_kernels
def test_a_shared_folder_with_the_sticky_bit_is_passed_through(source, tmp_path):
    """As for /tmp, where others cannot rename what is not theirs; what a link leads to is looked at, not the link."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "cache").symlink_to(tmp_path / "shared")
    assert load_library(source).answer() == 42
    assert len(kept(tmp_path)) == 1


def test_without_a_safe_place_there_are_no_kernels(source, tmp_path):
    """Where others can exchange temporary files too, nothing is compiled or loaded, and the folder is named."""
    for place in (tmp_path / "cache", tmp_path / "temporary"):
        place.mkdir(exist_ok=True)
        place.chmod(0o777)
    with pytest.raises(NoLibraryError, match=f"other users can exchange what lies in {tmp_path}/temporary; set"):
        load_library(source)
    assert not list((tmp_path / "temporary").iterdir())


def test_without_a_compiler_the_reason_is_said(source, tmp_path, monkeypatch):
    """Nothing on the PATH compiles: the error names what was looked for, every time it is asked."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for _ in range(2):
        with pytest.raises(NoLibraryError, match=f"no C compiler \\({', '.join(COMPILERS)}\\)"):
            load_library(source)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[ "$1" = --version ] && exit 0; echo "a.c:1: fatal error: no such header" >&2; exit 1', "no such header"),
        ('[ "$1" = --version ] && exit 0; exit 3', "exit status 3"),
        ("exit 1", "cc cannot compile the kernels here"),
        ('[ "$1" = --version ] && exit 0; exit 0', "could not be compiled or loaded"),
        ('[ "$1" = --version ] && exit 0; sleep 9', "timed out after"),
    ],
    ids=["error", "silent", "no version", "nothing written", "hangs"],
)
def test_a_compiler_that_fails_is_a_reason(source, tmp_path, monkeypatch, text, words):
    """What the compiler said last is in the error, and no half-made file stays."""
    program(tmp_path / "bin", text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(c_library, "COMPILE_S", 0.3)
    with pytest.raises(NoLibraryError, match=words):
        load_library(source)
    assert not kept(tmp_path)


def test_a_source_that_is_missing_is_a_reason(source):
    """A package without its C files has no kernels, and says so."""
    with pytest.raises(NoLibraryError, match="No such file"):
        load_library(source.parent / "elsewhere" / "answer.c")


def test_attention_without_a_compiler(tmp_path, monkeypatch):
    """Where no kernels can be had "auto" takes the streaming form and says why; by name they are refused in words."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(implementation, "kernels", lambda: kernels_of.__wrapped__("attention", NativeCall))
    c_library._loaded.cache_clear()
    try:
        choice = choose(LinearCall(X, X, X))
        assert choice.implementation == "streaming"
        assert "there is no C compiler" in choice.reason
        assert torch.equal(linear_attention(X, X, X)[0], linear_attention(X, X, X, implementation="streaming")[0])
        with pytest.raises(ConfigError, match="'native' was asked for, but there is no C compiler"):
            linear_attention(X, X, X, implementation="native")
    finally:
        c_library._loaded.cache_clear()


def test_old_versions_do_not_pile_up(tmp_path):
    """Of the compiled versions of a source the newest eight stay, and those of other sources are left alone."""
    for number in range(12):
        file = tmp_path / f"a-{number:02}.so"
        file.touch()
        os.utime(file, (number, number))
    (tmp_path / "b-0.so").touch()
    c_library._forget_old(tmp_path, "a")
    assert sorted(file.name for file in tmp_path.iterdir()) == [*(f"a-{n:02}.so" for n in range(4, 12)), "b-0.so"]

"""The files of blobs: names, what is whole or not there, locks, and what is synced before what."""

import os
from pathlib import Path

import pytest

from dist_attn.store.files import MAKE, WANTED, WRITING, BlobFile, BlobFolder
from tests.store.test_disk import full


def test_blobs_are_written_read_and_deleted(tmp_path: Path) -> None:
    """By appends and whole, alone and in groups; half-written ones and marks have their blob's name."""
    blobs = BlobFolder(tmp_path)
    blobs.append("one", b"abc")
    blobs.append("one", b"def")
    blobs.put("job_1/input", b"text")
    blobs.put("job_1/result", b"{}")
    assert (blobs.read("one"), blobs.read("one", 2, 3), blobs.read("one", 5, 9)) == (b"abcdef", b"cde", b"f")
    assert (blobs.size("one"), blobs.size("none"), blobs.read("job_1/input")) == (6, 0, b"text")
    assert (tmp_path / "_1/job_1/input").read_bytes() == b"text"
    blobs.append("two" + WRITING, b"half")
    blobs.path("one" + WANTED).touch()
    (tmp_path / "ne/.nfs0001").touch()
    assert blobs.names() == ["job_1", "one", "two"]
    for name in ("one", "two", "none"):
        blobs.delete(name)
    for name in ("job_1", "job_2"):
        blobs.delete_all(name)
    assert blobs.names() == [] and [path.name for path in tmp_path.glob("*/*")] == [".nfs0001"]
    with pytest.raises(FileNotFoundError):
        blobs.read("one")


@pytest.mark.parametrize("name", ["", ".", "..", "../one", "/one", "job_1/..", "job_1/../one", "job_1/a/b", "one\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    """Nothing is read, written or removed by a name that is none, above all not the whole folder."""
    blobs = BlobFolder(tmp_path / "bytes")
    blobs.put("one", b"kept")
    for action in (blobs.delete, blobs.delete_all, blobs.read, blobs.size):
        with pytest.raises(ValueError, match="is no name of a blob"):
            action(name)
    assert blobs.read("one") == b"kept"


def test_a_blob_is_put_whole_or_not_at_all(tmp_path: Path) -> None:
    """On a full disk the one that was there stays; what was left beside is written over."""
    blobs = BlobFolder(tmp_path)
    blobs.put("one", b"before")
    with full(1000), pytest.raises(OSError, match="too large"):
        blobs.put("one", bytes(2000))
    assert blobs.read("one") == b"before"
    blobs.put("one", b"after")
    assert blobs.read("one") == b"after" and not blobs.path("one" + WRITING).exists()


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path) -> None:
    """One file has it, others are told so; reading does not need it, and a blob that is not there has none."""
    blobs = BlobFolder(tmp_path)
    with blobs.open("one", MAKE) as first, blobs.open("one", MAKE) as second:
        assert first.lock() and not second.lock() and blobs.is_locked("one")
        first.write_at(b"x", 0)
        assert blobs.read("one") == b"x" and not first.deleted
        blobs.delete("one")
        assert first.deleted and not blobs.is_locked("one")
    blobs.append("one", b"")
    assert not blobs.is_locked("one")


def test_bytes_are_synced_before_their_name_and_every_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order of a whole blob: its bytes, the rename, then each folder on the way to it."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def renamed(path: Path, to: Path) -> Path:
        done.append("renamed")
        return replace(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    BlobFolder(tmp_path).put("job_1/result", b"{}")
    assert done[-5:] == [f"_1/job_1/result{WRITING}", "renamed", "_1/job_1", "_1", "."]


def test_files_are_their_owners_alone_and_an_unnamed_one_is_in_no_list(tmp_path: Path) -> None:
    """Whatever the umask is."""
    before = os.umask(0)
    try:
        blobs = BlobFolder(tmp_path / "new")
        blobs.put("one", b"x")
    finally:
        os.umask(before)
    paths = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(paths) == 3 and not any(path.stat().st_mode & 0o077 for path in paths)
    with BlobFile.unnamed(tmp_path) as file:
        file.write_at(b"abc", 5)
        assert (file.size, file.read_at(5, 9)) == (8, b"abc") and not list(tmp_path.glob("*.*"))

"""States whose catalogue was lost or damaged: the service does not start over them, and a command finds a way back."""

import asyncio
import json
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import httpx
import pytest

from dist_attn.commands.states import repair_states
from dist_attn.errors import CatalogueDamagedError, StorageError
from dist_attn.store import disk, open_store
from dist_attn.store.disk import CATALOGUE
from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.service_process import SECONDS, command, running_process
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

DEADLINE_S = 8 * SECONDS
Trouble = Callable[[Path], AbstractContextManager[None]]
TEXTS = (b"The first text.", b"A second one, which is longer.")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[bytes]]]:
    """The data folder of a service that was stopped, and the states in it."""
    folder = tmp_path_factory.mktemp("kept")
    with (
        fake_controller(FakeEngine(), f"ipc://{folder}/c") as address,
        running_process(folder, address) as (process, url),
    ):
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
        client, states = SessionClient(url), []
        for text in TEXTS:
            session = client.make()
            client.append(session, text)
            states.append(client.state(session).content)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    yield folder / "data", states


def spoil(catalogue: Path, how: str) -> None:
    """What may become of a catalogue."""
    content = catalogue.read_bytes()
    if how == "missing":
        catalogue.unlink()
    elif how == "empty":
        catalogue.write_bytes(b"")
    elif how == "garbage":
        catalogue.write_bytes(b"no database " * 1000)
    elif how == "cut in half":
        catalogue.write_bytes(content[: len(content) // 2])
    elif how == "a damaged page":
        catalogue.write_bytes(content[:4096] + b"\xff" * 4096 + content[8192:])
    else:
        with closing(sqlite3.connect(catalogue)) as connection, connection:
            connection.execute("UPDATE records SET value = x'7b00ff' WHERE key LIKE 'snapshot/%'")


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def repaired(folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    """`dist-attn state repair`, which has ended."""
    line = [sys.executable, "-m", "dist_attn", "state", "repair", str(folder), *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)


def test_states_without_a_sound_catalogue_stop_the_start(data: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """Exit code 2 and words that name the way back, no traceback; the states stay as they are."""
    shutil.copytree(data[0], tmp_path / "data")
    states = tmp_path / "data" / "states"
    before = files_in(states / "snapshots")
    (states / CATALOGUE).unlink()
    line = command(tmp_path, f"ipc://{tmp_path}/c")
    ended = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert f"dist-attn state repair {states}" in ended.stderr.splitlines()[-1]
    assert files_in(states / "snapshots") == before


@pytest.mark.parametrize("how", ["missing", "empty", "garbage", "cut in half", "a damaged page"])
def test_a_catalogue_that_is_not_sound_is_not_opened(data: tuple[Path, list[bytes]], tmp_path: Path, how: str) -> None:
    """The error, which ends a start, names the way back in one line; the states stay as they are."""
    states = tmp_path / "states"
    shutil.copytree(data[0] / "states", states)
    before = files_in(states / "snapshots")
    spoil(states / CATALOGUE, how)
    with pytest.raises(CatalogueDamagedError) as refused:
        asyncio.run(open_store(str(states)))
    assert f"dist-attn state repair {states}" in str(refused.value) and "\n" not in str(refused.value)
    assert files_in(states / "snapshots") == before


@pytest.mark.parametrize("how", ["missing", "cut in half"])
def test_a_repair_brings_sound_states_back(data: tuple[Path, list[bytes]], tmp_path: Path, how: str) -> None:
    """Each has a session of a service without keys, at its position and with its bytes, that can be gone on from."""
    shutil.copytree(data[0], tmp_path / "data")
    states = tmp_path / "data" / "states"
    spoil(states / CATALOGUE, how)
    told = json.loads(repaired(states, "--json").stdout)
    assert sorted(one["position"] for one in told["sessions"]) == sorted(map(len, TEXTS)) and told["refused"] == {}
    with (
        fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address) as (_, url),
    ):
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
        client = SessionClient(url)
        assert sorted(client.state(one["session"]).content for one in told["sessions"]) == sorted(data[1])
        first = min(told["sessions"], key=lambda one: int(one["position"]))
        assert client.append(first["session"], b"More.").bit_exact
    assert repaired(states).returncode == 2


def test_a_repair_deletes_nothing(data: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """What holds no sound state is moved aside with the old catalogue, and named; a sound store is left alone."""
    states = tmp_path / "states"
    shutil.copytree(data[0] / "states", states)
    spoil(states / CATALOGUE, "garbage")
    damaged = next(path for path in (states / "snapshots").rglob("*") if path.is_file())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    content = files_in(states)
    told = json.loads(repaired(states, "ab" * 32, "--json").stdout)
    assert len(told["sessions"]) == 1 and list(told["refused"]) == [damaged.name]
    aside = files_in(Path(told["aside"]))
    assert aside == {name: content[name] for name in (damaged.name, CATALOGUE)}
    assert content.keys() <= files_in(states).keys()
    for folder in (states, tmp_path / "nothing"):
        assert repaired(folder).returncode == 2


@contextmanager
def locked(catalogue: Path) -> Iterator[None]:
    """Another process has the catalogue for itself."""
    with closing(sqlite3.connect(catalogue)) as connection:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def no_room(_: Path) -> Iterator[None]:
    """No file can grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("trouble", "words"), [(locked, "is locked"), (no_room, "cannot be opened: disk I/O error")])
def test_a_sound_catalogue_that_cannot_be_read_is_not_repaired(
    data: tuple[Path, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Trouble, words: str
) -> None:
    """A catalogue that is locked or has no room for its log is not damaged: it stays in its place with all states."""
    states = tmp_path / "states"
    shutil.copytree(data[0] / "states", states)
    content = files_in(states)
    monkeypatch.setattr(disk, "BUSY_S", 0.1)
    with trouble(states / CATALOGUE), pytest.raises(StorageError, match=words):
        repair_states(states, caller="", as_json=True)
    assert not [*states.glob("aside-*")]
    content.pop(f"{CATALOGUE}-reserve")  # which is there to be given up
    assert content.items() <= files_in(states).items()
    assert repaired(states).returncode == 2  # it is sound


def test_a_record_that_cannot_be_read_is_an_error_of_the_store(data: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """A sound file with a record that is none is answered with words."""
    shutil.copytree(data[0], tmp_path / "data")
    spoil(tmp_path / "data" / "states" / CATALOGUE, "a record")
    with (
        fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address) as (_, url),
    ):
        client = SessionClient(url)
        session = client.get("/v1/sessions").json()["data"][0]["id"]
        answer = client.state(session)
    assert answer.json()["error"]["code"] == "storage_failed" and "holds what is no SnapshotRecord" in answer.text

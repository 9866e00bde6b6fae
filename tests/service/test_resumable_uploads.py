"""Resumable uploads over real sockets: what has arrived is kept, whatever happens, and is gone on with at its byte."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.service.test_process import MIB, SECONDS, running_process
from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.files import STREAM, begin, break_off, offset_of, patch, patch_head, wrong_in
from tests.support.raw_http import Answer, head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service that asks for no keys."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running
    assert wrong_in(running.settings.files_folder) == []


def content(service_url: str, answer: httpx.Response) -> bytes:
    """The bytes of the file that the last PATCH made."""
    return httpx.get(f"{service_url}/v1/files/{answer.headers['upload-file-id']}/content").content


def test_a_stream_in_pieces(service: RunningService) -> None:
    """Each PATCH goes on where the last ended, HEAD tells where, the last byte makes the file, metadata come back."""
    data = os.urandom(600_000)
    metadata = "filename " + "YS50eHQ=" + ",purpose " + "YmF0Y2g="
    address = begin(service.url, len(data), **{"Upload-Metadata": metadata})
    at = 0
    for stop in (1, 300_000, 300_001, 599_999):
        answer = patch(address, at, data[at:stop])
        assert answer.status_code == 204 and answer.headers["upload-offset"] == str(stop)
        at = stop
        assert offset_of(address) == stop
    told = httpx.head(address).headers
    assert (told["upload-length"], told["upload-metadata"]) == (str(len(data)), metadata)
    assert told["cache-control"] == "no-store" and told["upload-expires"].endswith("GMT")
    answer = patch(address, at, data[at:])
    assert content(service.url, answer) == data
    known = httpx.get(address).json()
    assert known["status"] == "completed" and known["file"]["filename"] == "a.txt" and known["purpose"] == "batch"
    assert offset_of(address) == len(data)
    assert httpx.delete(address, headers={"Tus-Resumable": "1.0.0"}).status_code == 204
    assert httpx.head(address).status_code == 404
    assert content(service.url, answer) == data


@pytest.mark.parametrize("size", [0, 1])
def test_creation_with_the_bytes(service: RunningService, size: int) -> None:
    """The bytes may come with the creation, and a file of none is complete at once."""
    headers = {"Upload-Length": str(size), "Tus-Resumable": "1.0.0"}
    with_bytes = {"Content-Type": STREAM} if size else {}
    answer = httpx.post(f"{service.url}/v1/uploads", headers={**headers, **with_bytes}, content=b"x" * size)
    assert answer.status_code == 201 and answer.headers["upload-offset"] == str(size)
    assert content(service.url, answer) == b"x" * size


def test_another_byte_is_a_conflict(service: RunningService) -> None:
    """A PATCH elsewhere than at the offset is a 409 that names the right one, and changes nothing."""
    address = begin(service.url, 10)
    assert patch(address, 0, b"abcd").status_code == 204
    for offset in (0, 3, 5, 10):
        refused = patch(address, offset, b"x")
        assert refused.status_code == 409 and refused.headers["upload-offset"] == "4"
        assert refused.headers["x-should-retry"] == "false" and "stands at 4" in refused.text
    for body in (b"1234567", iter([b"1234567"])):
        assert patch(address, 4, body).status_code == 413
    assert offset_of(address) == 4
    assert content(service.url, patch(address, 4, b"123456")) == b"abcd123456"
    assert patch(address, 10, b"").status_code == 409


def test_headers_that_cannot_be_used(service: RunningService) -> None:
    """Another version is a 412, another type a 415, missing or strange numbers a 400; OPTIONS says what is offered."""
    address = begin(service.url, 10)
    offered = httpx.options(f"{service.url}/v1/uploads")
    assert offered.status_code == 204 and "creation" in offered.headers["tus-extension"]
    assert offered.headers["tus-version"] == "1.0.0" and int(offered.headers["tus-max-size"]) > 0
    other = patch(address, 0, b"x", **{"Tus-Resumable": "0.2.2"})
    assert other.status_code == 412 and other.headers["tus-version"] == "1.0.0"
    assert patch(address, 0, b"x", **{"Content-Type": "text/plain"}).status_code == 415
    assert patch(address, 0, b"x", **{"Upload-Offset": "one"}).status_code == 400
    assert httpx.patch(address, headers={"Content-Type": STREAM}, content=b"x").status_code == 400
    assert httpx.patch(address, headers={"Upload-Offset": "0"}, content=b"").status_code == 415
    for headers in (
        {"Tus-Resumable": "1.0.0"},
        {"Upload-Length": "x"},
        {"Upload-Length": "1", "Upload-Metadata": "a b"},
    ):
        assert httpx.post(f"{service.url}/v1/uploads", headers=headers).status_code == 400
    purpose = {"Upload-Length": "1", "Upload-Metadata": "purpose cGxlYXN1cmU="}
    assert httpx.post(f"{service.url}/v1/uploads", headers=purpose).status_code == 400
    large = httpx.post(f"{service.url}/v1/uploads", headers={"Upload-Length": str(1 << 50)})
    assert large.status_code == 413
    assert offset_of(address) == 0


def test_a_broken_connection_keeps_what_came(service: RunningService) -> None:
    """After a reset in the middle of a PATCH, HEAD names a byte beyond nothing, and going on there gives the file."""
    data = os.urandom(500_000)
    address = begin(service.url, len(data))
    at = 0
    for stop in (100_000, 330_003):
        with service.connect() as connection:
            connection.sendall(patch_head(address, at, len(data) - at) + data[at:stop])
            eventually(lambda stop=stop: offset_of(address) == stop, "a silent client's bytes to be on disk")  # type: ignore[misc]
            break_off(connection)
        at = offset_of(address)
        assert at == stop
    assert content(service.url, patch(address, at, data[at:])) == data


def test_who_comes_later_goes_on(service: RunningService) -> None:
    """While a connection hangs, a PATCH at the right byte takes over, and the one that hung is told so."""
    address = begin(service.url, 20)
    with service.connect() as hanging:
        hanging.sendall(patch_head(address, 0, 20) + b"0123456789")
        eventually(lambda: offset_of(address) == 10, "the first ten bytes")
        answer = patch(address, 10, b"abcdefghij")
        assert answer.status_code == 204
        refused = Answer(hanging)
        assert refused.read_head() == 409
    assert content(service.url, answer) == b"0123456789abcdefghij"


def test_a_deleted_upload_ends_who_writes(service: RunningService) -> None:
    """Deleting an upload ends the PATCH that is under way, and its bytes go."""
    address = begin(service.url, 20)
    with service.connect() as writing:
        writing.sendall(patch_head(address, 0, 20) + b"0123456789")
        eventually(lambda: offset_of(address) == 10, "the first ten bytes")
        assert httpx.delete(address).status_code == 204
        refused = Answer(writing)
        assert refused.read_head() in (404, 409)
    assert httpx.head(address).status_code == 404


def test_two_replicas_share_a_folder(tmp_path: Path) -> None:
    """An upload begun with one replica goes on with another while the first still waits, and both have the file."""
    shared = {"folder": str(tmp_path / "shared")}
    with running_service(tmp_path / "a", files=shared) as one, running_service(tmp_path / "b", files=shared) as other:
        address = begin(one.url, 12)
        there = address.replace(one.url, other.url)
        with one.connect() as hanging:
            hanging.sendall(patch_head(address, 0, 12) + b"abcdef")
            eventually(lambda: offset_of(there) == 6, "what one has written to be seen by the other")
            answer = patch(there, 6, b"ghijkl")
            assert answer.status_code == 204 and Answer(hanging).read_head() == 409
        for service in (one, other):
            assert content(service.url, answer) == b"abcdefghijkl"
    assert wrong_in(tmp_path / "shared") == []


def test_a_full_disk_keeps_what_came(tmp_path: Path) -> None:
    """When the disk is full a PATCH is a 507 that keeps what fits, a form leaves nothing, and with room it goes on."""
    from tests.store.test_disk import full

    data = os.urandom(3_000_000)
    with running_service(tmp_path) as service:
        address = begin(service.url, len(data))
        assert patch(address, 0, data[:100]).status_code == 204
        with full(1_200_000):
            assert patch(address, 100, data[100:]).status_code == 507
            at = offset_of(address)
            assert at == 1_200_000
            sent = {"purpose": "batch"}
            refused = httpx.post(f"{service.url}/v1/files", data=sent, files={"file": data}, timeout=60)
            assert refused.status_code == 507 and refused.json()["error"]["code"] == "disk_full"
            assert httpx.get(f"{service.url}/livez").status_code == 200
        assert content(service.url, patch(address, at, data[at:])) == data
    assert wrong_in(tmp_path / "data/files") == []


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_came(tmp_path: Path) -> None:
    """After kill -9 in the middle of a PATCH and of a form, a new process names the byte, and the file is whole."""
    data = os.urandom(2_000_000)
    with fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as engine:
        with running_process(tmp_path, engine) as (process, url):
            address = begin(url, len(data))
            host, port = url.removeprefix("http://").split(":")
            with (
                socket.create_connection((host, int(port)), timeout=SECONDS) as stream,
                socket.create_connection((host, int(port)), timeout=SECONDS) as form,
            ):
                form.sendall(
                    head("/v1/files", "Content-Type: multipart/form-data; boundary=b", "Content-Length: 900000")
                    + b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
                    + bytes(300_000)
                )
                stream.sendall(patch_head(address, 0, len(data)) + data[:1_234_567])
                eventually(lambda: offset_of(address) == 1_234_567, "what came to be with the system")
                process.kill()
                process.wait(4 * SECONDS)
        with running_process(tmp_path, engine) as (process, url):
            address = url + "/" + address.split("/", 3)[3]
            at = offset_of(address)
            assert at == 1_234_567
            assert content(url, patch(address, at, data[at:])) == data
            process.terminate()
            assert process.wait(4 * SECONDS) == 0
            assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_stopping_keeps_what_came(tmp_path: Path) -> None:
    """SIGTERM in the middle of a PATCH: the client is told, the exit is clean, and what came is there afterwards."""
    with fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as engine:
        with running_process(tmp_path, engine, shutdown_seconds="1") as (process, url):
            address = begin(url, 20)
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=SECONDS) as stream:
                stream.sendall(patch_head(address, 0, 20) + b"0123456789")
                eventually(lambda: offset_of(address) == 10, "the first ten bytes")
                process.terminate()
                assert Answer(stream).read_head() == 503
            assert process.wait(4 * SECONDS) == 0
            assert "Traceback" not in (tmp_path / "log").read_text()
        with running_process(tmp_path, engine) as (_, url):
            assert offset_of(url + "/" + address.split("/", 3)[3]) == 10


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    """While a stream, a form and a download of many megabytes go through, the process hardly grows."""
    size = 48 * MIB
    block = os.urandom(MIB)
    with (
        fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as engine,
        running_process(tmp_path, engine) as (process, url),
    ):
        assert patch(begin(url, 10), 0, b"0123456789").status_code == 204
        resident = psutil.Process(process.pid).memory_info
        before = highest = resident().rss
        done = threading.Event()

        def look() -> None:
            nonlocal highest
            while not done.wait(0.02):
                highest = max(highest, resident().rss)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            answer = patch(begin(url, size), 0, (block for _ in range(size // MIB)))
            assert answer.status_code == 204
            sent = (tmp_path / "large").open("w+b")
            with sent:
                for _ in range(size // MIB):
                    sent.write(block)
                sent.seek(0)
                form = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": sent}, timeout=60)
            assert form.status_code == 200 and form.json()["bytes"] == size
            name = answer.headers["upload-file-id"]
            with httpx.stream("GET", f"{url}/v1/files/{name}/content", timeout=60) as download:
                assert sum(map(len, download.iter_raw())) == size
        finally:
            done.set()
            looking.join()
        assert highest - before < 24 * MIB, (highest - before) / MIB

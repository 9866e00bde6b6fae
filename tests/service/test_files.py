"""/v1/files over real sockets: forms of any size to disk, pages, ranges, and nobody sees another's."""

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.files import break_off, wrong_in
from tests.support.raw_http import CHUNKED, LAST_CHUNK, Answer, chunk, head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

ANN, BOB = "ann-key", "bob-key"
LIMIT = 300_000


def digest(key: str) -> str:
    """A key as it stands in the settings."""
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service with two callers and small files."""
    files = {"file_bytes": LIMIT, "caller_bytes": 2_000_000, "caller_files": 40}
    with running_service(
        tmp_path_factory.mktemp("service"), api_keys=(digest(ANN), digest(BOB)), files=files
    ) as running:
        yield running
    assert wrong_in(running.settings.files_folder) == []


def client(service: RunningService, key: str = ANN) -> httpx.Client:
    """A client with a key."""
    return httpx.Client(base_url=f"{service.url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=60)


def put(ann: httpx.Client, data: bytes, name: str = "a.txt", **fields: str) -> httpx.Response:
    """Send a file."""
    return ann.post("/files", data={"purpose": "user_data", **fields}, files={"file": (name, data, "text/plain")})


def made(ann: httpx.Client, data: bytes, name: str = "a.txt", **fields: str) -> str:
    """The id of a file."""
    answer = put(ann, data, name, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_the_official_client_works_as_it_is(service: RunningService) -> None:
    """Create, list, retrieve, content and delete do what they say, and the bytes are those that were sent."""
    data = os.urandom(200_001)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=ANN, max_retries=0) as ann:
        file = ann.files.create(
            file=("b.bin", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
        )
        assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "b.bin", "batch", "processed")
        assert file.expires_at is not None and 7190 <= file.expires_at - time.time() <= 7201
        assert ann.files.content(file.id).read() == data
        assert [one.id for one in ann.files.list(purpose="batch")] == [file.id]
        assert ann.files.retrieve(file.id) == file
        assert ann.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match="no file"):
            ann.files.retrieve(file.id)


@pytest.mark.parametrize("size", [0, 1, 65_536, LIMIT])
def test_files_of_odd_sizes(service: RunningService, size: int) -> None:
    """Nothing at all, one byte and exactly the limit come back as they were sent."""
    data = os.urandom(size)
    with client(service) as ann:
        name = made(ann, data)
        answer = ann.get(f"/files/{name}/content")
        assert answer.content == data and answer.headers["content-length"] == str(size)
        assert ann.delete(f"/files/{name}").json() == {"id": name, "object": "file", "deleted": True}


def test_what_is_over_a_limit_is_refused(service: RunningService) -> None:
    """A byte too many is a 413, whether the length is known or not, and nothing of it stays."""
    with client(service) as ann:
        assert put(ann, bytes(LIMIT + 1)).status_code == 413
        form = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": ("a", bytes(LIMIT + 1))})
        kind = {"Content-Type": form.headers["content-type"]}
        assert ann.post("/files", content=iter([form.read()]), headers=kind).status_code == 413
        early = ann.post("/files", content=bytes(LIMIT * 10), headers=kind)
        assert early.status_code == 413 and early.json()["error"]["code"] == "body_too_large"


def test_a_caller_has_a_share(service: RunningService) -> None:
    """Bytes over a caller's share are a 429 that is not to be tried again, and another caller has room."""
    with client(service) as ann, client(service, BOB) as bob:
        names = [made(ann, bytes(LIMIT)) for _ in range(6)]
        refused = put(ann, bytes(LIMIT))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "insufficient_quota"
        assert refused.headers["x-should-retry"] == "false"
        announced = {"bytes": 250_000, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
        assert ann.post("/uploads", json=announced).status_code == 429
        names.append(made(ann, bytes(2_000_000 - 6 * LIMIT)))  # exactly what is left
        other = made(bob, b"mine")
        for name in names:
            assert ann.delete(f"/files/{name}").status_code == 200
        assert bob.delete(f"/files/{other}").status_code == 200


def test_another_callers_file_is_not_there(service: RunningService) -> None:
    """Whatever is asked of it, another's file is answered like one that never was, and is in no list."""
    with client(service) as ann, client(service, BOB) as bob:
        name = made(ann, b"secret")
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            theirs = bob.request(method, f"/files/{name}{path}")
            unknown = bob.request(method, f"/files/{name[:-1]}{'a' if name[-1] != 'a' else 'b'}{path}")
            assert theirs.status_code == unknown.status_code == 404
            assert theirs.json()["detail"].split("'")[2] == unknown.json()["detail"].split("'")[2]
        assert bob.get("/files").json()["data"] == []
        assert bob.get("/files", params={"after": name}).status_code == 404
        for strange in ("..", "a%2F..%2Fb", "x" * 100, "%00", "é"):
            assert bob.get(f"/files/{strange}/content").status_code == 404
        assert ann.delete(f"/files/{name}").status_code == 200


def test_pages(service: RunningService) -> None:
    """Pages in both orders hold every file once, `purpose` chooses, and the official client walks over them."""
    with client(service) as ann:
        names = [made(ann, b"x", purpose=("batch", "vision")[i % 2]) for i in range(5)]
        for order, expected in (("asc", names), ("desc", names[::-1])):
            seen, after = [], {}
            while True:
                page = ann.get("/files", params={"limit": 2, "order": order, **after}).json()
                seen += [file["id"] for file in page["data"]]
                if not page["has_more"]:
                    break
                assert page["last_id"] == seen[-1] and len(page["data"]) == 2
                after = {"after": page["last_id"]}
            assert seen == expected
        found = ann.get("/files", params={"purpose": "vision", "order": "asc"}).json()
        assert [file["id"] for file in found["data"]] == names[1::2] and not found["has_more"]
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key=ANN, max_retries=0) as official:
            assert [file.id for file in official.files.list(limit=2, order="asc")] == names
        for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"purpose": "none"}, {"page": "2"}):
            assert ann.get("/files", params=query).status_code == 400
        for name in names:
            ann.delete(f"/files/{name}")


def test_ranges_of_a_file(service: RunningService) -> None:
    """A range is a 206 with its bytes, one beyond the end a 416, and `If-Range` of another file sends all."""
    data = os.urandom(10_000)
    with client(service) as ann:
        name = made(ann, data, name='ü "x".txt')
        address = f"/files/{name}/content"
        whole = ann.get(address)
        assert whole.content == data and whole.headers["accept-ranges"] == "bytes"
        assert whole.headers["content-type"] == "application/octet-stream"
        assert whole.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%BC%20%22x%22.txt"
        for value, part in (
            ("bytes=5-9", slice(5, 10)),
            ("bytes=-7", slice(-7, None)),
            ("bytes=9999-", slice(-1, None)),
        ):
            answer = ann.get(address, headers={"Range": value})
            assert answer.status_code == 206 and answer.content == data[part]
        assert answer.headers["content-range"] == "bytes 9999-9999/10000"
        beyond = ann.get(address, headers={"Range": "bytes=10000-"})
        assert beyond.status_code == 416 and beyond.headers["content-range"] == "bytes */10000"
        same = {"Range": "bytes=0-0", "If-Range": whole.headers["etag"]}
        assert ann.get(address, headers=same).status_code == 206
        assert ann.get(address, headers={**same, "If-Range": '"x"'}).content == data
        assert ann.delete(f"/files/{name}").status_code == 200


@pytest.mark.parametrize(
    ("fields", "files", "code"),
    [
        ({}, {"file": b"x"}, "missing_parameter"),
        ({"purpose": "batch"}, {}, "unsupported_media_type"),
        ({"purpose": "batch"}, {"data": b"x"}, "unknown_parameter"),
        ({"purpose": "pleasure"}, {"file": b"x"}, "invalid_value"),
        ({"purpose": "batch", "model": "x"}, {"file": b"x"}, "unknown_parameter"),
        ({"purpose": "b" * 5000}, {"file": b"x"}, "invalid_value"),
        ({"purpose": "batch", "expires_after[seconds]": "x"}, {"file": b"x"}, "invalid_value"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, {"file": b"x"}, "invalid_value"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9"},
            {"file": b"x"},
            "invalid_value",
        ),
        ({"purpose": "batch"}, [("file", b"x"), ("file", b"y")], "invalid_value"),
    ],
)
def test_forms_that_cannot_be_used(service: RunningService, fields: dict[str, str], files: object, code: str) -> None:
    """What is missing, unknown, double or wrong in a form is a 4xx with its name, and leaves nothing."""
    with client(service) as ann:
        answer = ann.post("/files", data=fields, files=files)  # type: ignore[arg-type]
        assert answer.status_code in (400, 415), answer.text
        assert answer.json()["error"]["code"] == code
        assert ann.get("/files").json()["data"] == []


def test_a_connection_that_breaks_in_a_file_leaves_nothing(service: RunningService) -> None:
    """Half a form, ended by a reset, holds neither bytes nor room afterwards; slow clients do get there."""
    body = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": ("a", bytes(100_000))})
    data, kind = body.read(), f"Content-Type: {body.headers['content-type']}"
    auth = f"Authorization: Bearer {ANN}"
    folder = service.settings.files_folder / "bytes"
    with service.connect() as connection:
        connection.sendall(head("/v1/files", kind, auth, f"Content-Length: {len(data)}") + data[:60_000])
        eventually(lambda: any(folder.glob("??/*")), "the first bytes to be on their way")
        break_off(connection)
    eventually(lambda: not any(folder.glob("??/*")), "the bytes to go")
    with service.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head("/v1/files", kind, auth, CHUNKED))
        for at in range(0, len(data), 7001):
            connection.sendall(chunk(data[at : at + 7001]))
        connection.sendall(LAST_CHUNK)
        answer = Answer(connection)
        assert answer.read_head() == 200
        name = answer.read_body().split(b'"')[3].decode()
    with client(service) as ann:
        assert ann.get(f"/files/{name}/content").content == bytes(100_000)
        ann.delete(f"/files/{name}")


def test_a_file_that_goes_while_it_is_read(service: RunningService, tmp_path: Path) -> None:
    """The answer to who reads a file whose bytes are gone is a 404, and none that could be taken for whole."""
    with client(service) as ann:
        name = made(ann, b"here")
        (blob,) = [
            path for path in (service.settings.files_folder / "bytes").glob("??/*") if path.read_bytes() == b"here"
        ]
        kept = tmp_path / "kept"
        os.link(blob, kept)
        blob.unlink()
        with pytest.raises(httpx.RemoteProtocolError):
            ann.get(f"/files/{name}/content")
        os.link(kept, blob)
        assert ann.get(f"/files/{name}/content").content == b"here"
        ann.delete(f"/files/{name}")

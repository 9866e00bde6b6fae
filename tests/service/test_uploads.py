"""/v1/uploads in parts over real sockets: the official client, parts in any order, and what must not be."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.files import begin, break_off, patch, wrong_in
from tests.support.raw_http import head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

ANN, BOB = "ann-key", "bob-key"
PART = 100_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service with two callers and small parts."""
    keys = tuple(hashlib.sha256(key.encode()).hexdigest() for key in (ANN, BOB))
    files = {"part_bytes": PART, "upload_parts": 6}
    with running_service(tmp_path_factory.mktemp("service"), api_keys=keys, files=files) as running:
        yield running
    assert wrong_in(running.settings.files_folder) == []


@pytest.fixture
def ann(service: RunningService) -> Iterator[httpx.Client]:
    """A client with a key."""
    with httpx.Client(base_url=f"{service.url}/v1", headers={"Authorization": f"Bearer {ANN}"}, timeout=60) as client:
        yield client


def started(ann: httpx.Client, size: int, **more: Any) -> str:
    """The id of a new upload."""
    wanted = {"bytes": size, "filename": "../a", "mime_type": "text/plain", "purpose": "user_data", **more}
    answer = ann.post("/uploads", json=wanted)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "pending" and answer.json()["file"] is None
    return str(answer.json()["id"])


def part(ann: httpx.Client, upload: str, data: bytes) -> httpx.Response:
    """Send a part."""
    return ann.post(f"/uploads/{upload}/parts", files={"data": data})


def parts(ann: httpx.Client, upload: str, *pieces: bytes) -> list[str]:
    """The ids of parts."""
    return [str(part(ann, upload, piece).json()["id"]) for piece in pieces]


def refusal(answer: httpx.Response, status: int, word: str) -> None:
    """The answer is an error with that status and that word."""
    assert answer.status_code == status and word in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("size", [0, 1, 2 * PART, 2 * PART + 1])
def test_the_official_client_uploads_in_parts(service: RunningService, tmp_path: Path, size: int) -> None:
    """`upload_file_chunked` works as it is, from memory and from a file, with the digest compared."""
    data = os.urandom(size)
    (tmp_path / "b.bin").write_bytes(data)
    md5 = hashlib.md5(data).hexdigest()
    options: dict[str, Any] = {"mime_type": "text/plain", "purpose": "batch", "part_size": PART, "md5": md5}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=ANN, max_retries=0) as client:
        one = client.uploads.upload_file_chunked(file=data, filename="a.bin", bytes=size, **options)
        other = client.uploads.upload_file_chunked(file=tmp_path / "b.bin", **options)
        for upload, name in ((one, "a.bin"), (other, "b.bin")):
            assert upload.status == "completed" and upload.file is not None
            assert (upload.file.filename, upload.file.bytes) == (name, size)
            assert client.files.content(upload.file.id).read() == data
            client.files.delete(upload.file.id)


def test_parts_go_where_they_are_named(ann: httpx.Client) -> None:
    """The order is that of `complete`, a part that is left out is no part of the file, ranges cross their edges."""
    upload = started(ann, 9)
    first, _, last, middle = parts(ann, upload, b"abc", b"never", b"ghi", b"def")
    done = ann.post(f"/uploads/{upload}/complete", json={"part_ids": [first, middle, last]}).json()
    address = f"/files/{done['file']['id']}/content"
    assert ann.get(address).content == b"abcdefghi"
    assert ann.get(address, headers={"Range": "bytes=2-6"}).content == b"cdefg"
    # an answer that was lost can be had again; in other words it is another request
    again = ann.post(f"/uploads/{upload}/complete", json={"part_ids": [first, middle, last]})
    assert again.json() == done
    refusal(ann.post(f"/uploads/{upload}/complete", json={"part_ids": [first]}), 409, "completed")
    refusal(part(ann, upload, b"x"), 409, "completed")
    refusal(ann.post(f"/uploads/{upload}/cancel"), 409, "completed")


def test_what_cannot_be_completed(ann: httpx.Client) -> None:
    """A wrong digest, too few bytes, a part twice, another upload's part and none at all are refused; then it works."""
    upload, other = started(ann, 6), started(ann, 6)
    first, last = parts(ann, upload, b"abc", b"def")
    (foreign,) = parts(ann, other, b"def")
    complete = f"/uploads/{upload}/complete"
    wrong = hashlib.md5(b"defabc").hexdigest()
    refusal(ann.post(complete, json={"part_ids": [first, last], "md5": wrong}), 400, hashlib.md5(b"abcdef").hexdigest())
    refusal(ann.post(complete, json={"part_ids": [first]}), 400, "these parts have 3 bytes")
    refusal(ann.post(complete, json={"part_ids": [first, first]}), 400, "named twice")
    refusal(ann.post(complete, json={"part_ids": [first, foreign]}), 400, "no part")
    refusal(ann.post(complete, json={"part_ids": []}), 400, "6 bytes of 6 have come")
    refusal(ann.post(complete, json={"part_ids": [first, "../x"]}), 400, "no part")
    refusal(ann.post(complete, json={"part_ids": first}), 400, "part_ids")
    assert ann.get(f"/uploads/{upload}").json()["received_bytes"] == 6
    right = hashlib.md5(b"abcdef").hexdigest().upper()
    assert ann.post(complete, json={"part_ids": [first, last], "md5": right}).status_code == 200
    assert ann.post(f"/uploads/{other}/cancel").json()["status"] == "cancelled"
    assert ann.post(f"/uploads/{other}/cancel").status_code == 200
    refusal(part(ann, other, b"x"), 409, "cancelled")
    assert ann.head(f"/uploads/{other}").status_code == 410


def test_parts_are_bounded(ann: httpx.Client) -> None:
    """A part has its limit and its upload's, there are so many of them, and what came again and again has an end."""
    upload = started(ann, 2 * PART)
    assert part(ann, upload, bytes(PART)).status_code == 200
    refusal(part(ann, upload, bytes(PART + 1)), 413, "a part may have")
    small = started(ann, 4)
    refusal(part(ann, small, bytes(5)), 413, "announced")
    assert len(parts(ann, small, b"abcd", b"abcd", b"abcd")) == 3
    refusal(part(ann, small, b"abcd"), 400, "complete it")
    many = started(ann, 100)
    assert len(parts(ann, many, *[b"x"] * 6)) == 6
    refusal(part(ann, many, b"x"), 400, "6 parts")
    for name in (upload, small, many):
        assert ann.delete(f"/uploads/{name}").status_code == 204
        assert ann.get(f"/uploads/{name}").status_code == 404


def test_another_callers_upload_is_not_there(service: RunningService, ann: httpx.Client) -> None:
    """Whatever is asked of it, another's upload is answered like one that never was."""
    upload = started(ann, 3)
    (own,) = parts(ann, upload, b"abc")
    stream = {"Upload-Offset": "0", "Content-Type": "application/offset+octet-stream"}
    with httpx.Client(base_url=f"{service.url}/v1", headers={"Authorization": f"Bearer {BOB}"}) as bob:
        for name in (upload, "upload_" + "a" * 24, "a%2Fb", "x" * 99):
            answers = [
                bob.get(f"/uploads/{name}"),
                bob.head(f"/uploads/{name}"),
                bob.patch(f"/uploads/{name}", headers=stream, content=b"x"),
                bob.delete(f"/uploads/{name}"),
                bob.post(f"/uploads/{name}/cancel"),
                bob.post(f"/uploads/{name}/complete", json={"part_ids": [own]}),
                part(bob, name, b"x"),
            ]
            assert [answer.status_code for answer in answers] == [404] * 7
    assert ann.post(f"/uploads/{upload}/complete", json={"part_ids": [own]}).status_code == 200


def test_a_part_that_breaks_off_leaves_nothing(service: RunningService, ann: httpx.Client) -> None:
    """A reset in the middle of a part gives its bytes and room back, and the part can be sent again."""
    upload = started(ann, PART)
    form = httpx.Request("POST", "http://x", files={"data": bytes(PART)})
    body, kind = form.read(), f"Content-Type: {form.headers['content-type']}"
    folder = service.settings.files_folder / "bytes"
    before = {path.name for path in folder.glob("??/*")}
    with service.connect() as connection:
        size = f"Content-Length: {len(body)}"
        connection.sendall(
            head(f"/v1/uploads/{upload}/parts", kind, f"Authorization: Bearer {ANN}", size) + body[:50_000]
        )
        eventually(lambda: {path.name for path in folder.glob("??/*")} > before, "the part to be on its way")
        break_off(connection)
    eventually(lambda: {path.name for path in folder.glob("??/*")} == before, "its bytes to go")
    (again,) = parts(ann, upload, bytes(PART))
    assert ann.post(f"/uploads/{upload}/complete", json={"part_ids": [again]}).status_code == 200


def test_an_upload_takes_parts_or_a_stream(service: RunningService, ann: httpx.Client) -> None:
    """Whichever came first stays; the other is a 409, and the bytes that came are not touched."""
    auth = {"Authorization": f"Bearer {ANN}"}
    upload = started(ann, 6)
    (own,) = parts(ann, upload, b"abcdef")
    assert patch(f"{service.url}/v1/uploads/{upload}", 6, b"", **auth).status_code == 409
    assert ann.post(f"/uploads/{upload}/complete", json={"part_ids": [own]}).status_code == 200
    address = begin(service.url, 6, **auth)
    assert patch(address, 0, b"abc", **auth).status_code == 204
    name = address.rsplit("/", 1)[1]
    refusal(part(ann, name, b"def"), 409, "PATCH")
    refusal(ann.post(f"/uploads/{name}/complete", json={"part_ids": []}), 400, "3 bytes of 6")
    assert patch(address, 3, b"def", **auth).status_code == 204
    done = ann.post(f"/uploads/{name}/complete", json={"part_ids": []}).json()
    assert done["status"] == "completed" and done["file"]["bytes"] == 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes": -1},
        {"bytes": 1.5},
        {"bytes": 1 << 60},
        {"filename": "a\nb"},
        {"filename": "\ud800"},
        {"filename": "a" * 2000},
        {"purpose": "pleasure"},
        {"expires_after": {"anchor": "now", "seconds": 3600}},
        {"expires_after": {"anchor": "created_at", "seconds": 5}},
        {"colour": "red"},
    ],
)
def test_uploads_that_cannot_begin(ann: httpx.Client, wrong: dict[str, Any]) -> None:
    """What an upload cannot be is refused by name."""
    wanted = {"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "batch", **wrong}
    answer = ann.post("/uploads", content=str(wanted).replace("'", '"'), headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413)
    assert answer.json()["error"]["param"] in (
        None,
        next(iter(wrong)),
        "seconds",
        "expires_after.seconds",
        "anchor",
        "expires_after.anchor",
    )

"""/v1/encodings with `file_id`: the rows of a file, read no faster than they are made."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.files import break_off
from tests.support.metrics import samples
from tests.support.raw_http import Answer, head, lines_of
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def put(service: RunningService, data: bytes, kind: str = "text/plain") -> str:
    """The id of a file."""
    files = {"file": ("a.txt", data, kind)}
    answer = httpx.post(f"{service.url}/v1/files", data={"purpose": "user_data"}, files=files, timeout=60)
    return str(answer.json()["id"])


def encode(service: RunningService, query: str = "", **body: object) -> httpx.Response:
    """An encoding by JSON."""
    return httpx.post(f"{service.url}/v1/encodings?{query}", json=body, timeout=60)


def test_the_rows_of_a_file_are_those_of_its_bytes(service: RunningService) -> None:
    """A file gives what the same bytes give as a body, in every format that needs nothing else."""
    short = "It was the best of times, añ€😀. ".encode() * 20
    long = short * 500  # more than is read from the disk at a time
    cases = ((short, "granularity=token&pooling=last"), (long, "window=4096"), (long, "format=npy&window=4096"))
    for data, query in cases:
        file = put(service, data)
        of_body = httpx.post(f"{service.url}/v1/encodings?{query}", content=data, timeout=60)
        of_file = encode(service, query, file_id=file)
        assert of_file.status_code == 200 and of_file.content == of_body.content
    assert lines_of(encode(service, file_id=file, window=4096).content)[-1]["tokens"] == len(data)


def test_text_files_are_utf8(service: RunningService) -> None:
    """What is called text is checked, and any bytes may be encoded as what they are."""
    data = b"abc" * 1000 + b"\xff"
    refused = encode(service, file_id=put(service, data))  # before the head or as the last line, as it happens
    error = json.loads(refused.content.splitlines()[-1])["error"]
    assert error["code"] == "invalid_utf8" and "byte 3000" in error["message"]
    any_bytes = put(service, data, "application/octet-stream")
    assert lines_of(encode(service, file_id=any_bytes).content)[-1]["tokens"] == len(data)


def test_files_that_cannot_be_encoded(service: RunningService) -> None:
    """No file, an empty one, one beside a text and neither of both are refused by name."""
    empty = put(service, b"")
    for body, status, code, param in (
        ({"file_id": "file-unknown"}, 404, "not_found", "file_id"),
        ({"file_id": "../x"}, 404, "not_found", "file_id"),
        ({"file_id": empty}, 400, "empty_input", "file_id"),
        ({"file_id": empty, "input": "a"}, 400, "invalid_value", "file_id"),
        ({}, 400, "missing_parameter", "input"),
    ):
        answer = encode(service, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


def test_a_file_is_read_as_fast_as_it_is_encoded(tmp_path: Path) -> None:
    """While the engine takes nothing, hardly anything of a file waits; a client that leaves then ends the work."""
    engine = FakeEngine(credit=1000, stingy=True)
    with running_service(tmp_path, engine, spool_memory_bytes=100_000) as service:
        file = put(service, bytes(4_000_000), "application/octet-stream")
        body = f'{{"file_id": "{file}"}}'.encode()
        with service.connect() as connection:
            kind = "Content-Type: application/json"
            connection.sendall(head("/v1/encodings?window=100", kind, f"Content-Length: {len(body)}") + body)
            answer = Answer(connection)
            assert answer.read_head() == 200
            assert answer.read_chunk().count(b"\n") >= 1
            assert samples(service)["dist_attn_spool_bytes", ()] < 1_000_000
            break_off(connection, answer)
        eventually(lambda: engine.open_count == 0, "the work to be cancelled")
        eventually(lambda: samples(service)["dist_attn_open_requests", ()] == 0, "the request to end")
        assert samples(service)["dist_attn_spool_bytes", ()] == 0

"""Jobs and estimates with `file_id`: a file that was uploaded in place of a text."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from dist_attn_service.routers.texts import SAMPLE_BYTES

from dist_attn.settings import JobSettings
from dist_attn.text import train_bpe
from tests.support.fake_engine import FakeEngine
from tests.support.raw_http import lines_of
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.waiting import eventually

PROSE = "The whale went down, and the ship went on towards the south, as she had done all day. " * 60
KEYS = {"own": "a" * 20, "other": "b" * 20}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with two callers and a tokeniser of several bytes per token."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "corpus.txt").write_text(PROSE)
    (folder / "keys").write_text("\n".join(KEYS.values()))
    model = model_folder(folder, train_bpe([folder / "corpus.txt"], 290))
    quick = JobSettings(look_s=0.02, save_s=0.05)
    with running_service(
        folder, FakeEngine(keep=False), model=model, jobs=quick, api_keys_file=str(folder / "keys")
    ) as running:
        yield running


def call(service: RunningService, method: str, path: str, key: str = "own", **options: Any) -> httpx.Response:
    """One request of one of the callers."""
    headers = {"authorization": f"Bearer {KEYS[key]}"}
    return httpx.request(method, service.url + path, headers=headers, timeout=60, **options)


def put(service: RunningService, data: bytes, kind: str = "text/plain") -> str:
    """The id of a file."""
    files = {"file": ("a.txt", data, kind)}
    return str(call(service, "POST", "/v1/files", data={"purpose": "user_data"}, files=files).json()["id"])


def test_a_job_of_a_file_is_one_of_its_bytes(service: RunningService) -> None:
    """A job takes a copy: its rows are those of the text, although the file is deleted as soon as the job is there."""
    file = put(service, PROSE.encode())
    made = call(service, "POST", "/v1/jobs", json={"file_id": file, "window": 100})
    assert made.status_code == 202 and made.json()["input_bytes"] == len(PROSE), made.text
    assert call(service, "DELETE", f"/v1/files/{file}").status_code == 200
    place = made.headers["location"]
    eventually(lambda: call(service, "GET", place).json()["status"] == "succeeded", "the job to be done")
    encoded = call(service, "POST", "/v1/encodings?window=100", content=PROSE.encode())
    assert lines_of(call(service, "GET", f"{place}/result").content) == lines_of(encoded.content)


def test_an_estimate_of_a_file_counts_or_samples_it(service: RunningService) -> None:
    """A short file is counted like a text; of a long one 16 pieces are, whose ratio keeps its bounds."""
    exact = call(service, "POST", "/v1/estimate", json={"input": PROSE}).json()["tokens"]
    of_file = call(service, "POST", "/v1/estimate", json={"file_id": put(service, PROSE.encode())}).json()["tokens"]
    assert of_file == exact and exact["source"] == "counted"
    long = PROSE * (3 * SAMPLE_BYTES // len(PROSE))
    sampled = call(service, "POST", "/v1/estimate", json={"file_id": put(service, long.encode())}).json()["tokens"]
    assert sampled["source"] == "sample"
    assert sampled["low"] <= exact["value"] * len(long) / len(PROSE) <= sampled["high"]


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/estimate"])
def test_files_that_cannot_be_used(service: RunningService, path: str) -> None:
    """No file, an empty one, another caller's and one beside a text are refused by name; a text is checked."""
    mine, empty = put(service, b"abc"), put(service, b"")
    for body, key, status, code in (
        ({"file_id": "file-unknown"}, "own", 404, "not_found"),
        ({"file_id": "../x"}, "own", 404, "not_found"),
        ({"file_id": mine}, "other", 404, "not_found"),
        ({"file_id": empty}, "own", 400, "empty_input"),
    ):
        answer = call(service, "POST", path, key, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, "file_id")
    twice = call(service, "POST", path, json={"file_id": mine, "input": "a"})
    assert twice.status_code == 400 and twice.json()["error"]["param"] in ("file_id", "input")
    if path == "/v1/jobs":
        broken = put(service, b"abc" * 1000 + b"\xff")
        assert call(service, "POST", path, json={"file_id": broken}).json()["error"]["code"] == "invalid_utf8"
        beside = call(service, "POST", path, json={"file_id": mine, "completion": {"prompt": "a"}})
        assert beside.status_code == 400 and beside.json()["error"]["param"] == "file_id"

"""A data folder that an earlier version has left: what goes on, and what is said of what cannot.

`data-0.1.0.tar.xz` is the data folder of version 0.1.0 after a session of 15 tokens, its fork with 15 more, a session
with a state of other weights, a file, and a job on it; it was written through the service with the fake engine.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dist_attn.settings import StoreSettings
from tests.support.fake_sessions import MANIFEST
from tests.support.service_server import RunningService, running_service
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually

FOLDER = Path(__file__).with_name("data-0.1.0.tar.xz")
OURS, THEIRS = MANIFEST.model.revision, "cd" * 6


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service on the folder."""
    folder = tmp_path_factory.mktemp("upgrade")
    with tarfile.open(FOLDER) as archive:
        archive.extractall(folder, filter="data")
    with running_service(folder, store=StoreSettings()) as running:
        yield running


def sessions_of(client: SessionClient) -> dict[str, str]:
    """The ids of the sessions in the folder by their names."""
    return {session["name"]: session["id"] for session in client.get("/v1/sessions").json()["data"]}


def test_sessions_files_and_jobs_go_on(service: RunningService) -> None:
    """Records, states, keys of appends, bytes and results are read as they were written."""
    client = SessionClient(service.url)
    sessions = sessions_of(client)
    first = client.get(f"/v1/sessions/{sessions['a letter']}").json()
    assert (first["position"], first["metadata"], first["revision"]) == (15, {"chapter": "1"}, OURS)
    assert client.append(sessions["a letter"], b"call me ishmael", "first").replayed
    assert client.append(sessions["a fork"], b", never mind").position == 42
    (file,) = client.get("/v1/files").json()["data"]
    assert client.get(f"/v1/files/{file['id']}/content").content == b"some text of a book"
    (job,) = client.get("/v1/jobs").json()["data"]
    assert job["status"] == "succeeded"
    assert client.get(f"/v1/jobs/{job['id']}/result").text.count("\n") == 4


def test_a_session_of_another_revision_says_so(service: RunningService) -> None:
    """Its own page, the model's, the log of the start and the refusal name the revisions; the last what to do."""
    client = SessionClient(service.url)
    session = sessions_of(client)["of another model"]
    assert client.get(f"/v1/sessions/{session}").json()["revision"] == THEIRS
    assert httpx.get(f"{service.url}/v1/models").json()["data"][0]["revision"] == OURS
    refused = client.post(f"/v1/sessions/{session}/generate", json={"max_tokens": 4})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "state_mismatch"
    assert f"revision {THEIRS}, and {OURS} is served here" in refused.text and "--model" in refused.text

    def told() -> list[dict[str, object]]:
        return [line for line in service.log_lines() if "sessions of another model" in line["event"]]

    eventually(lambda: bool(told()), "the line of the start")
    (line,) = told()
    assert (line["sessions"], line["of"], line["revisions"]) == (1, 3, {THEIRS: 1})

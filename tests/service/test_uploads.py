"""/v1/uploads as JSON and as other callers meet it: whose an upload is, and what it may be."""

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.files import patch, wrong_in
from tests.support.service_server import RunningService, running_service

ANN, BOB = "ann-key", "bob-key"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service with two callers."""
    keys = tuple(hashlib.sha256(key.encode()).hexdigest() for key in (ANN, BOB))
    with running_service(tmp_path_factory.mktemp("service"), api_keys=keys) as running:
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


def test_an_upload_by_json_goes_on_by_patch(service: RunningService, ann: httpx.Client) -> None:
    """It is told as it stands, becomes the file that was described, and deleted it is not there."""
    upload = started(ann, 6, expires_after={"anchor": "created_at", "seconds": 3600})
    auth = {"Authorization": f"Bearer {ANN}"}
    assert patch(f"{service.url}/v1/uploads/{upload}", 0, b"abc", **auth).status_code == 204
    assert ann.get(f"/uploads/{upload}").json()["received_bytes"] == 3
    assert patch(f"{service.url}/v1/uploads/{upload}", 3, b"def", **auth).status_code == 204
    done = ann.get(f"/uploads/{upload}").json()
    assert done["status"] == "completed" and (done["file"]["filename"], done["file"]["bytes"]) == ("../a", 6)
    assert done["file"]["expires_at"] - done["file"]["created_at"] == 3600
    assert ann.get(f"/files/{done['file']['id']}/content").content == b"abcdef"
    assert ann.delete(f"/uploads/{upload}").status_code == 204
    assert ann.get(f"/uploads/{upload}").status_code == 404


def test_another_callers_upload_is_not_there(service: RunningService, ann: httpx.Client) -> None:
    """Whatever is asked of it, another's upload is answered like one that never was."""
    upload = started(ann, 3)
    stream = {"Upload-Offset": "0", "Content-Type": "application/offset+octet-stream"}
    with httpx.Client(base_url=f"{service.url}/v1", headers={"Authorization": f"Bearer {BOB}"}) as bob:
        for name in (upload, "upload_" + "a" * 24, "a%2Fb", "x" * 99):
            answers = [
                bob.get(f"/uploads/{name}"),
                bob.head(f"/uploads/{name}"),
                bob.patch(f"/uploads/{name}", headers=stream, content=b"x"),
                bob.delete(f"/uploads/{name}"),
            ]
            assert [answer.status_code for answer in answers] == [404] * 4
    auth = {"Authorization": f"Bearer {ANN}"}
    assert patch(f"{service.url}/v1/uploads/{upload}", 0, b"abc", **auth).status_code == 204


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

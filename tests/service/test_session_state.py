"""States as files: read with tags and digests, put elsewhere and gone on from, refused where they are not sound."""

import base64
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from dist_attn.settings import StoreSettings
from dist_attn.wire import snapshot
from dist_attn.wire.snapshot import pack_snapshot
from dist_attn.wire.specs import LONGEST_TEXT
from tests.support.fake_sessions import MANIFEST, after, stored
from tests.support.service_server import RunningService, running_service
from tests.support.sessions import SessionClient
from tests.support.snapshots import mutate

TEXT = b"A text that somebody has read. "


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service with small states only."""
    store = StoreSettings(address="memory:", snapshot_bytes=100_000, hold_s=0.001)
    with running_service(tmp_path_factory.mktemp("service"), store=store) as running:
        yield running


def put(client: SessionClient, session: str, data: Any, **headers: str) -> httpx.Response:
    """Put a state."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.put(f"/v1/sessions/{session}/state", content=data, headers=named)


def test_a_state_is_read_with_what_names_it(service: RunningService) -> None:
    """ETag and digest are those of the bytes; who has them already gets a 304; checkpoints have theirs."""
    client = SessionClient(service.url)
    session = client.make()
    nothing = client.state(session)
    assert nothing.status_code == 404 and "append a text" in nothing.json()["detail"]
    client.append(session, TEXT)
    client.append(session, b"More.")
    answer = client.state(session)
    digest = hashlib.sha256(answer.content)
    assert answer.content == stored(after(0, TEXT + b"More."), len(TEXT) + 5)
    assert answer.headers["etag"] == f'"{digest.hexdigest()}"'
    assert answer.headers["content-digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["x-session-position"] == str(len(TEXT) + 5)
    path = f"/v1/sessions/{session}/state"
    assert client.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    assert client.get(path, headers={"if-none-match": '"other"'}).status_code == 200
    points = client.get(f"/v1/sessions/{session}/checkpoints").json()["data"]
    assert [point["position"] for point in points] == [len(TEXT), len(TEXT) + 5]
    earlier = client.state(session, position=len(TEXT))
    assert (earlier.headers["etag"], len(earlier.content)) == (points[0]["etag"], points[0]["bytes"])
    assert client.state(session, position=7).status_code == 404
    assert client.state(session, position="x").status_code == 400


def test_a_state_goes_on_in_another_service(service: RunningService, tmp_path: Path) -> None:
    """Put into a new session of a service that has never seen the text, it goes on as if nothing had been."""
    here = SessionClient(service.url)
    session = here.make()
    here.append(session, TEXT)
    state = here.state(session)
    with running_service(tmp_path) as other:
        there = SessionClient(other.url)
        moved = there.make()
        answer = put(there, moved, state.content, content_digest=state.headers["content-digest"])
        assert answer.status_code == 200 and answer.headers["etag"] == state.headers["etag"]
        assert (answer.json()["position"], answer.json()["checkpoints"]) == (len(TEXT), [len(TEXT)])
        last = there.append(moved, b"More.", expected_position=len(TEXT))
        assert (last.restored_position, last.recomputed_tokens, last.bit_exact) == (len(TEXT), 0, True)
        here.append(session, b"More.")
        assert there.state(moved).content == here.state(session).content


def test_a_state_takes_the_place_of_the_one_that_is_named(service: RunningService) -> None:
    """Without `If-Match` it is a 428, with another tag a 412, and what stood there stays; with its tag it goes."""
    client = SessionClient(service.url)
    session = client.make()
    assert put(client, session, stored(5, 9), if_match="*").status_code == 412
    assert put(client, session, stored(5, 9)).status_code == 200
    tag = client.state(session).headers["etag"]
    required = put(client, session, stored(6, 4))
    assert required.status_code == 428 and required.headers["etag"] == tag and tag in required.json()["detail"]
    for headers in ({"if_match": '"other"'}, {"if_match": f"W/{tag}"}, {"if_none_match": "*"}):
        refused = put(client, session, stored(6, 4), **headers)
        assert refused.status_code == 412 and refused.json()["error"]["code"] == "precondition_failed"
    assert client.state(session).content == stored(5, 9)
    assert put(client, session, stored(6, 4), if_match=f'"x", {tag}').json()["position"] == 4
    assert client.get(f"/v1/sessions/{session}/checkpoints").json()["data"][0]["position"] == 4
    client.append(session, b"moved on")
    assert put(client, session, stored(7, 5), if_match=tag).status_code == 412
    assert put(client, session, stored(7, 5), if_match="*").json()["checkpoints"] == [5]


def test_the_state_of_another_model_is_refused(service: RunningService) -> None:
    """With the field and both values, before its bytes have come; nothing of it is kept."""
    other = replace(MANIFEST, model=replace(MANIFEST.model, weights="cd" * 32))
    client = SessionClient(service.url)
    session = client.make()
    answer = put(client, session, b"".join(pack_snapshot(other, 5, []).pieces()))
    assert answer.status_code == 409 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "state_mismatch"
    assert "weights" in answer.text and "cd" * 32 in answer.text and MANIFEST.model.weights in answer.text
    assert client.state(session).status_code == 404


def test_what_is_no_state_is_refused(service: RunningService) -> None:
    """Damaged, cut, too long, empty or of another kind: a 4xx in words, and the session is as it was."""
    client = SessionClient(service.url)
    session = client.make()
    good = stored(5, 9)
    for data in (b"", b"hello", good[:-1], good + b"x", good[:100], bytes([good[0] ^ 1]) + good[1:], good[:-1] + b"!"):
        answer = put(client, session, data)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_state", answer.text
    assert put(client, session, stored(0, 0)).status_code == 400
    assert put(client, session, b"x" * 100_001).status_code == 413
    assert put(client, session, good, content_type="image/png").status_code == 415
    assert put(client, session, good, content_digest=f"sha-256=:{'A' * 43}=:").status_code == 400
    assert put(client, session, good, content_digest="sha-256=:AAAA:").status_code == 400
    assert put(client, session, good, content_digest="md5=:AAAA:").status_code == 200
    assert client.state(session).content == good


def test_no_state_stands_beyond_the_last_position(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is taken; one that lies in the store from before is neither forked nor gone on from, and can be replaced."""
    client = SessionClient(service.url)
    session = client.make()
    monkeypatch.setattr(snapshot, "LONGEST_TEXT", 1 << 53)
    beyond = stored(5, 1 << 53)
    assert put(client, session, beyond).status_code == 200
    monkeypatch.undo()
    refused = put(client, client.make(), beyond)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_state"
    assert str(1 << 53) in refused.text and str(LONGEST_TEXT) in refused.text
    path = f"/v1/sessions/{session}"
    for answer in (
        client.post(f"{path}/fork"),
        client.post(f"{path}/generate", json={"max_tokens": 3}),
        client.post(f"{path}/append", content=b"more", headers={"content-type": "text/plain"}),
    ):
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_state", answer.text
        assert f"at most {LONGEST_TEXT} tokens" in answer.json()["detail"]
    assert put(client, session, stored(5, LONGEST_TEXT), if_match="*").status_code == 200


@pytest.mark.slow
def test_spoilt_files_are_never_an_error_of_ours(service: RunningService) -> None:
    """Files with any bytes changed, cut, repeated or exchanged are taken whole or refused with a 4xx."""
    client, rng = SessionClient(service.url), random.Random(0)
    seen = set()
    for number in range(50):
        session = client.make()
        answer = put(client, session, mutate(stored(number, 9), rng))
        assert answer.status_code in (200, 400, 409, 413), (number, answer.text)
        seen.add(answer.status_code)
    assert 400 in seen


@pytest.mark.parametrize("damage", ["cut", "a flipped bit", "gone"])
def test_a_damaged_state_is_said(tmp_path: Path, damage: str) -> None:
    """Bytes that have changed on the disk are neither sent, gone on from nor forked: 500 `state_damaged` in words."""
    with running_service(tmp_path, store=StoreSettings(address=str(tmp_path / "states"))) as service:
        client = SessionClient(service.url)
        session = client.make()
        client.append(session, TEXT)
        (blob,) = [path for path in (tmp_path / "states/snapshots").glob("*/*") if path.is_file()]
        data = blob.read_bytes()
        if damage == "gone":
            blob.unlink()
        else:
            blob.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
        path = f"/v1/sessions/{session}"
        answers = client.state(session), client.post(f"{path}/fork"), client.post(f"{path}/generate", json={})
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "state_damaged"), answer.text
            assert answer.headers["x-should-retry"] == "false"
        last = client.append_lines(session, b"more")[-1]
        assert (last["error"]["code"], last["position"]) == ("state_damaged", len(TEXT))
        assert not [line for line in service.log_lines() if line.get("event") == "unexpected error"]
        again = client.make()
        client.append(again, TEXT)  # comes to the same state, which mends the damaged one
        assert client.state(session).content == client.state(again).content == data

"""Sessions as they are kept: made, looked at, listed, forked and ended, each caller's own, within bounds."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service.app import create_app
from dist_attn_service.base.errors import Code
from dist_attn_service.base.settings import Settings

from dist_attn.errors import StorageError
from dist_attn.settings import StoreSettings
from dist_attn.wire.messages import Checkpoint
from tests.support.fake_engine import FakeEngine
from tests.support.metrics import samples, value
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def test_a_session_is_made_looked_at_and_ended(service: RunningService) -> None:
    """What it was made with is what it shows; once ended it is not there, and ending it again is a 404."""
    client = SessionClient(service.url)
    answer = client.post("/v1/sessions", json={"name": "notes", "metadata": {"book": "1"}, "ttl_seconds": 60})
    made = answer.json()
    assert answer.status_code == 201 and answer.headers["location"] == f"/v1/sessions/{made['id']}"
    assert (made["name"], made["metadata"], made["position"], made["busy"]) == ("notes", {"book": "1"}, 0, False)
    assert made["expires_at"] - made["created_at"] in (59, 60, 61)
    shown = client.get(answer.headers["location"])
    assert shown.json() == made
    assert client.delete(f"/v1/sessions/{made['id']}").json() == {
        "id": made["id"], "object": "session.deleted", "deleted": True,
    }  # fmt: skip
    for method in ("GET", "DELETE"):
        gone = client.request(method, f"/v1/sessions/{made['id']}")
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x" * 257}, "name"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"metadata": {"x": 5}}, "metadata"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": 1e-300}, "ttl_seconds"),
        ({"ttl_seconds": 1e9}, None),
        ({"path": "/etc"}, "path"),
    ],
)
def test_what_a_session_may_be_called_is_bounded(service: RunningService, body: dict[str, Any], param: str) -> None:
    """Long names, much metadata, lives without an end, and unknown options are a 400 that names them."""
    answer = httpx.post(f"{service.url}/v1/sessions", json=body)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").split(".")[0] == (param or "")


def test_sessions_are_listed_by_pages(tmp_path: Path) -> None:
    """Every session once, in order, however small the pages are; a body may be left out."""
    with running_service(tmp_path) as service:
        made = {httpx.post(f"{service.url}/v1/sessions").json()["id"] for _ in range(5)}
        seen: list[str] = []
        more = True
        while more:
            page = httpx.get(
                f"{service.url}/v1/sessions", params={"limit": 2, "after": seen[-1] if seen else ""}
            ).json()
            seen += [session["id"] for session in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            more = page["has_more"]
        assert seen == sorted(made)
        for wrong in ({"limit": 0}, {"limit": "many"}, {"limit": 101}, {"order": "asc"}, {"after": "x" * 101}):
            assert httpx.get(f"{service.url}/v1/sessions", params=wrong).status_code == 400, wrong
        assert httpx.get(f"{service.url}/v1/sessions", params={"after": "zzz"}).json()["data"] == []


def test_callers_do_not_see_each_other(tmp_path: Path) -> None:
    """With another key a session is not there, whatever is asked of it."""
    hashes = tuple(hashlib.sha256(key.encode()).hexdigest() for key in ("ann", "ben"))
    with running_service(tmp_path, api_keys=hashes) as service:
        ann, ben = SessionClient(service.url, "ann"), SessionClient(service.url, "ben")
        session = ann.make()
        assert ann.append(session, "a secret").position == 8
        state = ann.get(f"/v1/sessions/{session}/state").content
        path = f"/v1/sessions/{session}"
        for method, where, options in (
            ("GET", path, {}), ("DELETE", path, {}), ("GET", f"{path}/checkpoints", {}), ("GET", f"{path}/state", {}),
            ("POST", f"{path}/fork", {}), ("POST", f"{path}/append", {"content": b"x"}),
            ("POST", f"{path}/generate", {"json": {}}), ("PUT", f"{path}/state", {"content": state}),
        ):  # fmt: skip
            answer = ben.request(method, where, **options)
            assert answer.status_code == 404, (method, where, answer.text)
        assert ben.get("/v1/sessions").json()["data"] == []
        assert [found["id"] for found in ann.get("/v1/sessions").json()["data"]] == [session]


def test_forks_never_touch_each_other(service: RunningService) -> None:
    """A fork begins at a checkpoint; what is appended to one changes nothing of the other, and ending one neither."""
    client = SessionClient(service.url)
    session = client.make()
    first = client.append(session, "The first part. ")
    second = client.append(session, "The second.")
    forked = client.post(f"/v1/sessions/{session}/fork", json={"position": first.position, "name": "other"})
    assert forked.status_code == 201
    fork = forked.json()
    assert (fork["parent"], fork["parent_position"], fork["position"]) == (session, first.position, first.position)
    straight = client.make()
    client.append(straight, "The first part. ")
    client.append(straight, "Another second.")
    client.append(fork["id"], "Another second.")
    states = [client.get(f"/v1/sessions/{name}/state").content for name in (session, fork["id"], straight)]
    assert states[1] == states[2] != states[0]
    client.delete(f"/v1/sessions/{session}")
    assert client.get(f"/v1/sessions/{fork['id']}/state").content == states[1]
    nowhere = client.post(f"/v1/sessions/{fork['id']}/fork", json={"position": 5})
    assert nowhere.status_code == 404 and str(first.position) in nowhere.json()["detail"]
    assert second.position == 27


def test_what_a_caller_may_keep_is_bounded(tmp_path: Path) -> None:
    """Over the number of sessions, or of bytes, it is a 429 that no client retries; what is there stays."""
    store = StoreSettings(address="memory:", tenant_sessions=2, tenant_bytes=4000, session_checkpoints=2, hold_s=0.001)
    with running_service(tmp_path, store=store) as service:
        client = SessionClient(service.url)
        sessions = [client.make() for _ in range(2)]
        refused = client.post("/v1/sessions")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == Code.INSUFFICIENT_QUOTA
        assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
        client.append(sessions[0], "x")
        lines = client.append_lines(sessions[1], b"y")
        while "error" not in lines[-1]:
            lines = client.append_lines(sessions[1], b"y")
        assert lines[-1]["error"]["code"] == Code.INSUFFICIENT_QUOTA
        assert lines[-1]["position"] == client.get(f"/v1/sessions/{sessions[1]}").json()["position"] > 0
        assert client.state(sessions[0]).status_code == client.state(sessions[1]).status_code == 200


def test_sessions_that_nobody_uses_end(tmp_path: Path) -> None:
    """After its life a session is not there any more, and a round of upkeep has let go of what it kept."""
    store = StoreSettings(address="memory:", upkeep_s=0.05, hold_s=0.01)
    with running_service(tmp_path, store=store, expired_seconds=0.1) as service:
        client = SessionClient(service.url)
        session = client.make(ttl_seconds=3)  # long enough to be seen with its state, on a busy machine too
        client.append(session, "soon forgotten")
        stays = client.make()
        assert value(samples(service), "dist_attn_stored_bytes") > 1000
        eventually(lambda: client.get(f"/v1/sessions/{session}").status_code == 404, "the session to end")

        def kept() -> tuple[int, int, int]:
            status = httpx.get(f"{service.url}/v1/status").json()
            return status["stored_sessions"], status["stored_states"], status["stored_bytes"]

        eventually(lambda: kept() == (1, 0, 0), "its state to be let go of")
        assert value(samples(service), "dist_attn_stored_sessions") == 1
        assert client.get(f"/v1/sessions/{stays}").status_code == 200
        assert any(line["event"] == "upkeep of the store" for line in service.log_lines())


def test_sessions_are_there_after_a_restart(tmp_path: Path) -> None:
    """A folder keeps them: a service that starts over it goes on where the one before ended."""
    folder = StoreSettings()
    with running_service(tmp_path, store=folder) as service:
        session = SessionClient(service.url).make(name="lasting")
        first = SessionClient(service.url).append(session, "Kept on disk. ")
    with running_service(tmp_path, FakeEngine(), store=folder) as service:
        client = SessionClient(service.url)
        assert client.get(f"/v1/sessions/{session}").json()["position"] == first.position
        second = client.append(session, "And gone on from.", expected_position=first.position)
        assert (second.restored_position, second.recomputed_tokens, second.bit_exact) == (first.position, 0, True)


def test_folders_that_others_can_read_are_tightened(tmp_path: Path) -> None:
    """At the start, with a line of log for each: the data folder, and states, jobs and files in it."""
    data = tmp_path / "data"
    open_to_others = [data, data / "states", data / "jobs", data / "files"]
    for folder in [*open_to_others, data / "spool", data / "encoder"]:
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    with running_service(tmp_path, store=StoreSettings()) as service:
        SessionClient(service.url).make()
        said = [line["folder"] for line in service.log_lines() if "open to other users" in line["event"]]
    assert said == list(map(str, open_to_others))
    assert [folder.stat().st_mode & 0o777 for folder in open_to_others] == [0o700] * 4


def test_a_folder_that_is_not_ours_alone_keeps_its_rights(tmp_path: Path) -> None:
    """States in a folder with other things, such as a checkout: those keep their rights, and a warning says so."""
    place = tmp_path / "checkout"
    (place / "page").mkdir(parents=True)
    (place / "page" / "run.sh").write_text("")
    for path in (place, place / "page", place / "page" / "run.sh"):
        path.chmod(0o755)
    with running_service(tmp_path, store=StoreSettings(address=str(place))) as service:
        SessionClient(service.url).make()
        said = [line["folder"] for line in service.log_lines() if "other things are in it" in line["event"]]
    assert {path.stat().st_mode & 0o777 for path in (place, place / "page", place / "page" / "run.sh")} == {0o755}
    assert said == [str(place)]


def test_a_store_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    """A place for states that cannot be used is said at the start, not at the first append."""
    (tmp_path / "file").write_text("no folder")
    store = StoreSettings(address=str(tmp_path / "file"))
    settings = Settings(api_address="ipc:///x", model=model_folder(tmp_path), data_dir=tmp_path, store=store)

    async def start() -> None:
        app = create_app(settings)
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")

    with pytest.raises(StorageError, match="cannot be opened"):
        asyncio.run(start())


def test_a_state_of_no_open_request_is_deleted(tmp_path: Path) -> None:
    """The engine has stored it when its request was over: nobody else knows its name."""
    engine = FakeEngine()
    with running_service(tmp_path, engine) as service:
        blob, digest, size = engine.store.put(b"a state")
        service.engine_port.inject(Checkpoint("over", 7, 0, blob, digest, size))
        eventually(lambda: not engine.store.read(blob), "it to be deleted")


def test_an_engine_with_another_store_has_no_states(tmp_path: Path) -> None:
    """Sessions are refused with what to do, prompts and jobs do without states, and the log says so at the start."""
    engine = FakeEngine(place="00" * 16)
    with running_service(tmp_path, engine, store=StoreSettings(address=str(tmp_path / "states"))) as service:
        client = SessionClient(service.url)
        refused = client.post(f"/v1/sessions/{client.make()}/append", content=b"some text")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, Code.STORAGE_FAILED)
        assert "give both the same store.address and store.blobs" in refused.json()["error"]["message"]
        for _ in range(2):
            answer = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a" * 2000, "max_tokens": 2}).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        job = httpx.post(f"{service.url}/v1/jobs?window=512", content=b"b" * 2000).json()["id"]
        eventually(lambda: httpx.get(f"{service.url}/v1/jobs/{job}").json()["status"] == "succeeded", "the job")
        assert any("another store" in line["event"] for line in service.log_lines())
        assert not engine.store.blobs
    engine.place = (tmp_path / "states" / "place").read_text()
    with running_service(tmp_path, engine, store=StoreSettings(address=str(tmp_path / "states"))) as service:
        client = SessionClient(service.url)
        assert client.append(client.make(), "some text").position == 9

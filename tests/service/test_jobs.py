"""/v1/jobs over real sockets: work that outlives its connection, is followed, cancelled, and found again."""

import errno
import io
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dist_attn.settings import JobSettings
from tests.support.fake_engine import HIDDEN, FakeEngine, say
from tests.support.opening import is_session
from tests.support.raw_http import CHUNKED, TEXT, chunk, head, lines_of
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

TEXT_OF_ROWS = b"It was the best of times, it was the worst of times. " * 40
get, post, delete, request = (
    partial(call, timeout=60) for call in (httpx.get, httpx.post, httpx.delete, httpx.request)
)
QUICK = {"look_s": 0.02, "save_s": 0.05}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service"), jobs=JobSettings(**QUICK)) as running:
        yield running


def hand_in(service: RunningService, data: bytes = TEXT_OF_ROWS, query: str = "window=64") -> str:
    """The id of a new encoding job."""
    answer = post(f"{service.url}/v1/jobs?{query}", content=data, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    name: str = answer.json()["id"]
    return name


def job(service: RunningService, name: str) -> dict[str, Any]:
    """How a job stands."""
    found: dict[str, Any] = get(f"{service.url}/v1/jobs/{name}").json()
    return found


def ended(service: RunningService, name: str, status: str = "succeeded") -> dict[str, Any]:
    """The job, as soon as it has ended, as it should."""
    last: list[dict[str, Any]] = []

    def look() -> bool:
        last[:] = [job(service, name)]
        return last[0]["status"] in ("succeeded", "failed", "cancelled")

    eventually(look, "the job to end")
    assert last[0]["status"] == status, last[0]
    return last[0]


def events(service: RunningService, name: str, **how: Any) -> list[dict[str, Any]]:
    """All events to the end of the job, each with its number."""
    answer = get(f"{service.url}/v1/jobs/{name}/events", timeout=60, **how)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append({"number": int(fields["id"]), "event": fields["event"], **json.loads(fields["data"])})
    return found


def test_a_job_gives_the_rows_of_an_encoding(service: RunningService) -> None:
    """202 and a place at once; later the same lines as /v1/encodings, in every format, from whichever row on."""
    whole = lines_of(post(f"{service.url}/v1/encodings?window=64", content=TEXT_OF_ROWS).content)
    name = hand_in(service)
    done = ended(service, name)
    assert done["progress"]["rows"] == len(whole) - 1 and done["progress"]["fraction"] == 1
    assert done["progress"]["tokens"] == len(TEXT_OF_ROWS) and done["expires_at"] > done["ended_at"] > 0
    result = f"{service.url}/v1/jobs/{name}/result"
    assert lines_of(get(result).content) == whole
    assert lines_of(get(f"{result}?from_row=30").content) == whole[30:]
    vectors = np.array([row["embedding"] for row in whole[:-1]], np.float32)
    npy = get(f"{result}?format=npy&from_row=3")
    np.testing.assert_array_equal(np.load(io.BytesIO(npy.content)), vectors[3:], strict=True)
    ipc = pytest.importorskip("pyarrow.ipc", reason="pip install -e '.[arrow]'")
    table = ipc.open_stream(io.BytesIO(get(result, headers={"Accept": "application/vnd.apache.arrow.stream"}).content))
    assert [row["index"] for row in table.read_all().to_pylist()] == list(range(len(vectors)))


def test_parts_of_an_npy_file(service: RunningService) -> None:
    """Range gives exactly these bytes with 206, 416 where there are none; another format has no ranges."""
    name = hand_in(service)
    ended(service, name)
    url = f"{service.url}/v1/jobs/{name}/result?format=npy"
    whole = get(url)
    total = len(whole.content)
    for asked, part in (("bytes=0-9", whole.content[:10]), ("bytes=100-1000", whole.content[100:1001]),
                        (f"bytes={total - 5}-", whole.content[-5:]), ("bytes=-70", whole.content[-70:])):  # fmt: skip
        answer = get(url, headers={"Range": asked, "If-Range": whole.headers["etag"]})
        assert answer.status_code == 206 and answer.content == part, asked
        assert answer.headers["content-range"].endswith(f"/{total}")
    assert get(url, headers={"Range": f"bytes={total}-"}).status_code == 416
    assert get(url, headers={"Range": "bytes=0-9", "If-Range": '"other"'}).status_code == 200
    assert get(f"{service.url}/v1/jobs/{name}/result", headers={"Range": "bytes=0-9"}).status_code == 200


def test_json_hands_in_an_encoding_or_a_completion(tmp_path: Path) -> None:
    """Both kinds; a completion is checked at once, drawn with a settled seed, and its JSON is the result."""
    with running_service(tmp_path, FakeEngine(reply=say(b"hello")), jobs=JobSettings(**QUICK)) as service:
        url = f"{service.url}/v1/jobs"
        encoding = post(url, json={"input": "abc" * 50, "window": 10, "pooling": "last"})
        assert encoding.status_code == 202 and encoding.json()["kind"] == "encoding"
        drawn = post(url, json={"completion": {"prompt": "say", "max_tokens": 50}})
        assert drawn.status_code == 202 and drawn.json()["kind"] == "completion"
        assert ended(service, encoding.json()["id"])["progress"]["rows"] == 15
        done = ended(service, drawn.json()["id"])
        answer = get(f"{url}/{drawn.json()['id']}/result").json()
        assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == "hello"
        assert answer["usage"]["completion_tokens"] == done["progress"]["tokens"] == 6
        for body, param in (
            ({}, "input"),
            ({"input": ""}, "input"),
            ({"input": "a", "completion": {}}, "input"),
            ({"completion": {"prompt": "a", "stream": True}}, "stream"),
            ({"completion": {"prompt": "a", "max_tokens": 0}}, "max_tokens"),
            ({"completion": {"prompt": ""}}, "prompt"),
        ):
            refused = post(url, json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
        assert post(f"{url}?format=npy", content=b"abc").json()["error"]["param"] == "format"


def test_the_client_may_leave(tmp_path: Path) -> None:
    """The job goes on without anybody, and whoever comes back with its id has all."""
    engine = FakeEngine(paused=True)
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK)) as service:
        name = hand_in(service)
        eventually(lambda: job(service, name)["status"] == "running", "it to run")
        service.engine_port.resume()
        ended(service, name)
        assert [event["event"] for event in events(service, name)][-1] == "succeeded"
        assert len(lines_of(get(f"{service.url}/v1/jobs/{name}/result").content)) == 35
        listed = get(f"{service.url}/v1/jobs").json()
        assert [entry["id"] for entry in listed["data"]] == [name] and not listed["has_more"]


def test_events_are_numbered_and_go_on_after_any_of_them(service: RunningService) -> None:
    """Every number once and growing; `after` and Last-Event-ID leave out what is known; the last one is the end."""
    name = hand_in(service)
    found = events(service, name)
    numbers = [event["number"] for event in found]
    assert numbers == sorted(set(numbers)) and [e["event"] for e in found][:2] == ["created", "started"]
    assert found[-1]["event"] == "succeeded" and found[-1]["rows"] == 34
    assert events(service, name, params={"after": numbers[0]}) == found[1:]
    assert events(service, name, headers={"Last-Event-ID": str(numbers[-2])}) == found[-1:]
    assert events(service, name, params={"after": numbers[-1]}) == []
    assert job(service, name)["last_event"] == numbers[-1]


def test_rows_are_followed_while_they_come(tmp_path: Path) -> None:
    """The result of a job that runs begins with what is there and ends when the job does; npy waits for the end."""
    engine = FakeEngine(credit=1000, stingy=True)
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK)) as service:
        name = hand_in(service, b"x" * 5000, "window=100")
        url = f"{service.url}/v1/jobs/{name}/result"
        with httpx.stream("GET", url, timeout=60) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            assert json.loads(next(lines))["index"] == 0
            early = get(f"{url}?format=npy")
            assert early.status_code == 409 and early.json()["error"]["code"] == "job_not_done"
            assert early.headers["x-should-retry"] == "false"
            assert post(f"{service.url}/v1/jobs/{name}/cancel").status_code == 200
            rest = [json.loads(line) for line in lines]
        assert [row["index"] for row in rest[:-1]] == list(range(1, 10)) and rest[-1]["object"] == "error"
        assert ended(service, name, "cancelled")["progress"]["rows"] == 10
        eventually(lambda: engine.open_count == 0, "the engine to be told")


def test_a_reader_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    """Its connection ends when it takes nothing for too long; the job and other readers do not notice."""
    data = b"x" * 60_000
    with running_service(
        tmp_path, FakeEngine(keep=False), jobs=JobSettings(**QUICK), client_stall_seconds=0.5
    ) as service:
        name = hand_in(service, data, "granularity=token")
        with service.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(head(f"/v1/jobs/{name}/result", "x-request-id: slow", method="GET"))
            ended(service, name)
            answer = get(f"{service.url}/v1/jobs/{name}/result?format=npy", timeout=60)
            assert np.load(io.BytesIO(answer.content)).shape == (60_000, HIDDEN)
            assert service.logged("slow")["reason"] == "client_gone"


@pytest.mark.parametrize("stage", ["queued", "waiting", "running", "ended"])
def test_cancel_at_every_stage(tmp_path: Path, stage: str) -> None:
    """Before its turn, while it waits for the engine, in the middle, and afterwards, when nothing changes."""
    engine = FakeEngine(stingy=True, credit=500, ready=stage != "waiting", reason="starting")
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK, at_once=1)) as service:
        first = hand_in(service, b"x" * 2000, "window=100")
        name = hand_in(service, b"y" * 400, "window=100") if stage == "queued" else first
        if stage == "running":
            eventually(lambda: engine.open_count == 1, "it to be in the engine")
        elif stage == "waiting":
            eventually(lambda: job(service, name)["status"] == "running", "it to wait for the engine")
        elif stage == "ended":
            post(f"{service.url}/v1/jobs/{name}/cancel")
            ended(service, name, "cancelled")
        told = post(f"{service.url}/v1/jobs/{name}/cancel").json()
        assert told["status"] == "cancelled" or told["cancel_requested"]
        done = ended(service, name, "cancelled")
        assert job(service, name) == done and events(service, name)[-1]["event"] == "cancelled"
        if stage == "running":
            eventually(lambda: engine.open_count == 0, "the engine to be told")
        post(f"{service.url}/v1/jobs/{first}/cancel")
        ended(service, first, "cancelled")


@pytest.mark.parametrize("running", [True, False])
def test_delete_forgets_everything(tmp_path: Path, running: bool) -> None:
    """The job is gone at once for its caller, and its files soon, whether it runs or has ended."""
    engine = FakeEngine(stingy=running, credit=500)
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK)) as service:
        name = hand_in(service, b"x" * 2000, "window=100")
        if running:
            eventually(lambda: engine.open_count == 1, "it to run")
        else:
            ended(service, name)
        assert delete(f"{service.url}/v1/jobs/{name}").status_code == 204
        for method, path in (("GET", ""), ("GET", "/result"), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
            assert request(method, f"{service.url}/v1/jobs/{name}{path}").status_code == 404
        assert get(f"{service.url}/v1/jobs").json()["data"] == []
        eventually(lambda: not [*(tmp_path / "data/jobs/files").glob("*/*")], "the files to go")
        eventually(lambda: engine.open_count == 0, "the engine to be told")


def test_a_body_that_breaks_off_is_no_job(tmp_path: Path) -> None:
    """A client that leaves before its body is whole, an empty body or one that is no text leaves nothing behind."""
    with running_service(tmp_path, jobs=JobSettings(**QUICK)) as service:
        with service.connect() as connection:
            connection.sendall(head("/v1/jobs", TEXT, CHUNKED, "x-request-id: left") + chunk(b"x" * 100_000))
            eventually(lambda: bool([*(tmp_path / "data/jobs/files").glob("*/*")]), "the file to be begun")
        assert service.logged("left")["reason"] == "client_gone"
        assert post(f"{service.url}/v1/jobs", content=b"").status_code == 400
        broken = post(f"{service.url}/v1/jobs", content=b"ab\xff", headers={"Content-Type": "text/plain"})
        assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_utf8"
        eventually(lambda: not [*(tmp_path / "data/jobs/files").glob("*/*")], "the files to go")
        assert get(f"{service.url}/v1/jobs").json()["data"] == []


def test_no_other_user_can_read_what_was_sent(tmp_path: Path) -> None:
    """Whatever the umask is, the folders of jobs and files are 0700, and all in them 0600: catalogues, bytes, rows."""
    data, before = tmp_path / "data", os.umask(0)
    try:
        with running_service(tmp_path, jobs=JobSettings(**QUICK)) as service:
            ended(service, hand_in(service))
            drawn = post(f"{service.url}/v1/jobs", json={"completion": {"prompt": "say", "max_tokens": 5}})
            ended(service, drawn.json()["id"])
            form = {"data": {"purpose": "user_data"}, "files": {"file": ("book", TEXT_OF_ROWS, "text/plain")}}
            assert post(f"{service.url}/v1/files", **form).status_code == 200
            paths = [path for place in ("jobs", "files") for path in (data / place, *(data / place).rglob("*"))]
            found = {str(path): path.stat().st_mode & 0o777 for path in paths}
    finally:
        os.umask(before)
    assert {path.name for path in paths} >= {"input", "ranges", "result", "catalogue.sqlite-wal", "files.sqlite"}
    assert {path for path, mode in found.items() if mode != (0o700 if Path(path).is_dir() else 0o600)} == set()


def refuse_fsync(monkeypatch: pytest.MonkeyPatch, place: str, number: int = errno.EIO) -> None:
    """Let fsync fail with that number for whatever has a path of this pattern."""
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if re.fullmatch(place, os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(number, "the disk does not answer")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)


@pytest.mark.parametrize("place", ["files/../job_[^/]*/input", "files/../job_[^/]*", "files/..", "files"])
@pytest.mark.parametrize("by", ["body", "file"])
def test_a_job_is_answered_only_when_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, place: str
) -> None:
    """The input and every name on the way to it are synced before 202: where one cannot be, there is no job."""
    jobs = tmp_path / "data/jobs"
    with running_service(tmp_path, FakeEngine(ready=False), jobs=JobSettings(**QUICK)) as service:
        url = f"{service.url}/v1/jobs"
        form = {"data": {"purpose": "user_data"}, "files": {"file": ("book", TEXT_OF_ROWS, "text/plain")}}
        body: dict[str, Any] = {"content": TEXT_OF_ROWS}
        if by == "file":
            body = {"json": {"file_id": post(f"{service.url}/v1/files", **form).json()["id"]}}
        refuse_fsync(monkeypatch, f"{jobs}/{place}")
        refused = post(url, **body)
        assert refused.status_code == 507 and "does not answer" in refused.json()["error"]["message"], refused.text
        assert get(url).json()["data"] == [] and not [*jobs.glob("files/*/*")]
        monkeypatch.undo()
        assert post(url, **body).status_code == 202


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, "storage_failed"), (errno.ENOSPC, "disk_full")])
def test_only_a_full_disk_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    """Of a job that cannot be taken, and of one whose result cannot be written."""
    engine = FakeEngine(ready=False)
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK)) as service:
        name = post(f"{service.url}/v1/jobs", json={"input": "abc"}).json()["id"]
        refuse_fsync(monkeypatch, f"{tmp_path}/data/jobs/.*", number)
        refused = post(f"{service.url}/v1/jobs", json={"input": "abc"})
        assert refused.status_code == 507 and refused.json()["error"]["code"] == code
        engine.ready = True
        assert ended(service, name, "failed")["error"]["code"] == code


@pytest.mark.parametrize(
    ("body", "place"),
    [({"input": "abc"}, "/vectors"), ({"input": "abc"}, "/ranges"), ({"input": "abc"}, ""),
     ({"completion": {"prompt": "a"}}, "/result.writing"), ({"completion": {"prompt": "a"}}, "")],
)  # fmt: skip
def test_a_job_succeeds_only_when_its_result_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], place: str
) -> None:
    """Rows, completions and their names are synced before the job has ended: where one cannot be, it has failed."""
    engine = FakeEngine(ready=False)
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK)) as service:
        name = post(f"{service.url}/v1/jobs", json=body).json()["id"]
        refuse_fsync(monkeypatch, f"{tmp_path}/data/jobs/files/../{name}{place}")
        engine.ready = True
        failed = ended(service, name, "failed")
        assert "does not answer" in failed["error"]["message"]


@pytest.mark.parametrize("lost", ["vectors", "ranges"])
def test_rows_that_are_lost_are_not_answered(service: RunningService, lost: str) -> None:
    """A result whose file is shorter than the catalogue says ends with an error that says so."""
    name = hand_in(service)
    ended(service, name)
    path = service.settings.data_dir / "jobs/files" / name[-2:] / name / lost
    os.truncate(path, path.stat().st_size - 1)
    lines = lines_of(get(f"{service.url}/v1/jobs/{name}/result").content)
    assert lines[-1]["error"]["code"] == "storage_failed" and "no longer on the disk" in lines[-1]["error"]["message"]


def test_quotas(tmp_path: Path) -> None:
    """Too many jobs, and more bytes than all may take, are refused with words; what was deleted counts no more."""
    limits = JobSettings(**QUICK, per_caller=2, disk_bytes=20_000)
    with running_service(tmp_path, jobs=limits) as service:
        big = post(f"{service.url}/v1/jobs", content=b"x" * 20_001)
        assert big.status_code == 507 and big.json()["error"]["code"] == "disk_full"
        names = [hand_in(service, b"x" * 1000) for _ in range(2)]
        third = post(f"{service.url}/v1/jobs", content=b"x")
        assert third.status_code == 429 and third.json()["error"]["code"] == "insufficient_quota"
        for name in names:
            ended(service, name)
            assert delete(f"{service.url}/v1/jobs/{name}").status_code == 204
        name = hand_in(service, b"x" * 1000, "granularity=token")
        full = ended(service, name, "failed")
        assert full["error"]["code"] == "disk_full" and "delete jobs" in full["error"]["message"]


def test_what_ended_expires(tmp_path: Path) -> None:
    """After its time a job is gone for its caller, and soon its files."""
    with running_service(tmp_path, jobs=JobSettings(**QUICK, keep_s=0.2)) as service:
        name = hand_in(service)
        url = f"{service.url}/v1/jobs/{name}"
        eventually(lambda: get(url).status_code == 404, "it to be hidden", 60)
        eventually(lambda: not [*(tmp_path / "data/jobs/files").glob("*/*")], "its files to go", 60)


def test_failures_end_a_job_and_restarts_do_not(tmp_path: Path) -> None:
    """An engine that gives up fails the job with its words; one that is away is waited for."""
    engine = FakeEngine(fail_at=1000)
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK), engine_ready_seconds=0.1) as service:
        failed = ended(service, hand_in(service), "failed")
        assert failed["error"]["code"] == "engine_failed" and "rank 1 died" in failed["error"]["message"]
        lines = lines_of(get(f"{service.url}/v1/jobs/{failed['id']}/result").content)
        assert lines[-1]["object"] == "error" and "rank 1 died" in lines[-1]["error"]["message"]
        engine.fail_at, engine.ready, engine.reason = None, False, "epoch 2 starts"
        name = hand_in(service)
        eventually(lambda: job(service, name)["attempts"] >= 2, "it to try again")
        engine.ready = True
        assert ended(service, name)["progress"]["rows"] == 34
        assert "resumed" in [event["event"] for event in events(service, name)]


def test_prefer_makes_an_encoding_a_job(service: RunningService) -> None:
    """`respond-async` gives 202 and the job; with `wait` only where it would take longer; nothing else changes."""
    url = f"{service.url}/v1/encodings?window=64"
    answer = post(url, content=TEXT_OF_ROWS, headers={"Prefer": "respond-async"})
    assert answer.status_code == 202 and answer.headers["preference-applied"] == "respond-async"
    assert ended(service, answer.json()["id"])["progress"]["rows"] == 34
    for prefer in ("respond-async, wait=600", "return=minimal", "wait=0"):
        assert post(url, content=TEXT_OF_ROWS, headers={"Prefer": prefer}).status_code == 200
    spoken = post(url.split("?")[0], json={"input": "abc"}, headers={"Prefer": "Respond-Async"})
    assert spoken.status_code == 202


@pytest.mark.parametrize("when_busy", ["refuse", "job"])
def test_work_that_would_wait_too_long(tmp_path: Path, when_busy: str) -> None:
    """429 with Retry-After, or a job where the client or the settings allow one."""
    engine = FakeEngine(keep=False, credit=100_000)
    limits = JobSettings(**QUICK, queue_s=1e-6, when_busy=when_busy)
    with running_service(tmp_path, engine, jobs=limits) as service:
        url = f"{service.url}/v1/encodings"
        post(url, content=b"x" * 500_000).raise_for_status()  # by which it knows how fast the engine is
        with service.connect() as connection:
            connection.sendall(head("/v1/encodings", TEXT, CHUNKED) + chunk(b"abc"))
            eventually(lambda: engine.open_count == 1, "other work")
            answer = post(url, content=b"x" * 100_000)
            assert answer.status_code == (202 if when_busy == "job" else 429), answer.text
            if when_busy == "refuse":
                assert int(answer.headers["retry-after"]) >= 1 and "respond-async" in answer.text
            willing = post(url, content=b"x" * 100_000, headers={"Prefer": "respond-async, wait=100000"})
            assert willing.status_code == 202
            by_edges = post(url, json={"input": "x" * 100_000, "boundaries": [9]})
            assert by_edges.status_code == answer.status_code, by_edges.text
        eventually(lambda: engine.open_count == 0, "it to be over")


def test_a_service_that_stops_goes_on_where_it_was(tmp_path: Path) -> None:
    """What runs is handed back; after the next start the rows that are there stay and others follow, as events say."""
    engine = FakeEngine(stingy=True, credit=1000)
    with running_service(tmp_path, engine, jobs=JobSettings(**QUICK)) as service:
        name = hand_in(service, b"x" * 5000, "window=100")
        eventually(lambda: job(service, name)["progress"]["rows"] == 10, "the first rows to be safe")
    vectors = next((tmp_path / "data/jobs/files").glob("*/*/vectors"))
    kept, changed = vectors.read_bytes(), vectors.stat().st_ino
    again = FakeEngine()
    with running_service(tmp_path, again, jobs=JobSettings(**QUICK)) as service:
        done = ended(service, name)
        assert done["progress"]["rows"] == 50 and done["attempts"] == 2
        lines = lines_of(get(f"{service.url}/v1/jobs/{name}/result").content)
        assert [line["index"] for line in lines[:-1]] == list(range(50))
        assert vectors.stat().st_ino == changed and vectors.read_bytes().startswith(kept)
        rows = [event["rows"] for event in events(service, name) if event["event"] == "progress"]
        assert rows == sorted(rows) and 10 in rows
        assert "resumed" in [event["event"] for event in events(service, name)]
        assert sum(is_session(message) for message in again.received) == 1


def test_two_processes_share_jobs(tmp_path: Path) -> None:
    """Each shows, follows and cancels what the other runs; every job runs once."""
    engines = [FakeEngine(stingy=True, credit=500), FakeEngine(stingy=True, credit=500)]
    limits = JobSettings(**QUICK, at_once=1)
    with (
        running_service(tmp_path, engines[0], jobs=limits) as one,
        running_service(tmp_path, engines[1], jobs=limits) as two,
    ):
        names = [hand_in(one, b"x" * 2000, "window=100") for _ in range(2)]
        eventually(lambda: all(engine.open_count == 1 for engine in engines), "each to run one of them")
        assert {job(two, name)["status"] for name in names} == {"running"}
        for name in names:
            eventually(lambda name=name: job(two, name)["progress"]["rows"] == 5, "its rows to be safe")
            assert post(f"{two.url}/v1/jobs/{name}/cancel").status_code == 200
            assert events(one, name)[-1]["event"] == "cancelled"
            lines = lines_of(get(f"{two.url}/v1/jobs/{name}/result").content)
            assert [line["index"] for line in lines[:-1]] == list(range(5))
        eventually(lambda: not any(engine.open_count for engine in engines), "both engines to be told")
        opened = sum(is_session(m) for engine in engines for m in engine.received)
        assert opened == 2


def test_readers_and_writers_at_once(tmp_path: Path) -> None:
    """Many hand in, follow and read at the same time, and each gets its own."""
    with running_service(tmp_path, FakeEngine(keep=False), jobs=JobSettings(**QUICK, at_once=4)) as service:
        wrong: list[str] = []

        def use(number: int) -> None:
            name = hand_in(service, bytes([97 + number]) * (500 + number), "window=50")
            last = events(service, name)[-1]
            lines = lines_of(get(f"{service.url}/v1/jobs/{name}/result", timeout=60).content)
            if last["event"] != "succeeded" or lines[-1]["tokens"] != 500 + number:
                wrong.append(name)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and len(get(f"{service.url}/v1/jobs").json()["data"]) == 8
        page = get(f"{service.url}/v1/jobs?limit=5").json()
        rest = get(f"{service.url}/v1/jobs?after={page['data'][-1]['id']}").json()
        assert page["has_more"] and len(page["data"]) + len(rest["data"]) == 8

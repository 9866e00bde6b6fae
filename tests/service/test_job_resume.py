"""Jobs that go on from a state: nothing before it is read again, and the rows are those of an undisturbed run."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from dist_attn_service.encodings.encoding_run import RowBlock
from dist_attn_service.jobs.catalogue import JobPoint
from dist_attn_service.jobs.files import JobRowFile

from dist_attn.settings import JobSettings, StoreSettings
from dist_attn.text import ByteTokeniser, Tokeniser, train_bpe
from dist_attn.wire.messages import Failed
from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.fake_sessions import MANIFEST
from tests.support.jobs import point_of
from tests.support.metrics import samples, value
from tests.support.raw_http import lines_of
from tests.support.service_process import running_process
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.waiting import eventually

QUICK = JobSettings(look_s=0.02, save_s=0.05)
PROSE = b"The whale went down, and the ship went on towards the south, as she had done all day. "


def job(url: str, name: str) -> dict[str, Any]:
    """How a job stands."""
    found: dict[str, Any] = httpx.get(f"{url}/v1/jobs/{name}", timeout=60).json()
    return found


def point(folder: Path, name: str) -> JobPoint | None:
    """Where it would go on."""
    return asyncio.run(point_of(folder / "data", name))


def stands_at(folder: Path, name: str, tokens: int) -> bool:
    """Whether it would go on there."""
    found = point(folder, name)
    return found is not None and found.run.tokens == tokens


def result(url: str, name: str) -> list[dict[str, Any]]:
    """All lines of a job, once it has ended well."""
    eventually(lambda: job(url, name)["status"] == "succeeded", "the job to end")
    return lines_of(httpx.get(f"{url}/v1/jobs/{name}/result", timeout=60).content)


@pytest.mark.slow
def test_a_killed_service_reads_on_from_the_last_state(tmp_path: Path) -> None:
    """After kill -9 the next process reads no token before the last kept state, and writes no row a second time."""
    engine, data = FakeEngine(credit=5000, stingy=True, keep=False), PROSE * 140
    with fake_controller(engine, f"ipc://{tmp_path}/c") as address:
        with running_process(tmp_path, address, checkpoint_tokens="1024") as (process, url):
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
            name = httpx.post(f"{url}/v1/jobs?window=64", content=data).json()["id"]
            eventually(lambda: job(url, name)["progress"]["rows"] == 78, "the first rows to be safe")
            eventually(lambda: stands_at(tmp_path, name, 4096), "the last state to be kept")
            process.kill()
            process.wait(60)
        vectors = next((tmp_path / "data/jobs/files").glob("*/*/vectors"))
        kept, file = vectors.read_bytes(), vectors.stat().st_ino
        engine.stingy, before = False, engine.sessions.read
        with running_process(tmp_path, address, checkpoint_tokens="1024") as (_, url):
            rows = result(url, name)
            assert engine.sessions.read - before == len(data) - 4096
            assert rows == lines_of(httpx.post(f"{url}/v1/encodings?window=64", content=data).content)
            assert job(url, name)["attempts"] == 2 and point(tmp_path, name) is None
        assert vectors.stat().st_ino == file and vectors.read_bytes().startswith(kept)


def bpe(folder: Path) -> Tokeniser:
    """Tokens of several bytes, which end where blocks of the text do not."""
    (folder / "corpus").write_bytes(PROSE * 20)
    return train_bpe([folder / "corpus"], 300)


@pytest.mark.parametrize(
    ("query", "makes", "kept"),
    [("window=64", bpe, 3072), ("granularity=token", bpe, 3072), ("window=96&pooling=last", bpe, 3072),
     ("window=300", lambda _: ByteTokeniser(), 0), ("granularity=document", lambda _: ByteTokeniser(), 0)],
)  # fmt: skip
def test_rows_and_ranges_are_those_of_an_undisturbed_run(tmp_path: Path, query: str, makes: Any, kept: int) -> None:
    """Whatever the rows and the tokeniser: every line is the same, also where no row ends on the grid of states."""
    model, data = model_folder(tmp_path, makes(tmp_path)), PROSE * 400
    engine = FakeEngine(credit=4000, stingy=True, keep=False)
    options = {"model": model, "jobs": QUICK, "checkpoint_tokens": 1000, "piece_bytes": 700, "store": StoreSettings()}
    with running_service(tmp_path, engine, **options) as service:
        name = httpx.post(f"{service.url}/v1/jobs?{query}", content=data).json()["id"]
        if kept:
            eventually(lambda: stands_at(tmp_path, name, kept), "the last state to be kept")
        else:
            eventually(lambda: job(service.url, name)["progress"]["tokens"] > 3000 or "doc" in query, "it to be read")
    engine = FakeEngine(keep=False)
    with running_service(tmp_path, engine, **options) as service:
        rows = result(service.url, name)
        assert engine.sessions.read in (0, rows[-1]["tokens"] - kept)
        whole = httpx.post(f"{service.url}/v1/encodings?{query}", content=data, timeout=60)
        assert rows == lines_of(whole.content)


def interrupted(folder: Path, data: bytes) -> str:
    """A job that has a state at 3072 and is not at its end."""
    with running_service(
        folder, FakeEngine(credit=4000, stingy=True), jobs=QUICK, checkpoint_tokens=1024, store=StoreSettings()
    ) as service:
        name: str = httpx.post(f"{service.url}/v1/jobs?window=64", content=data).json()["id"]
        eventually(lambda: stands_at(folder, name, 3072), "the last state to be kept")
    return name


def whole(service: RunningService, name: str, data: bytes) -> bool:
    """Whether the result is that of an encoding."""
    encoded = httpx.post(f"{service.url}/v1/encodings?window=64", content=data, timeout=60)
    return result(service.url, name) == lines_of(encoded.content)


def stored_states(service: RunningService) -> float:
    """How many states the store keeps."""
    return value(samples(service), "dist_attn_stored_states")


@pytest.mark.parametrize("lost", ["state", "rows"])
def test_what_is_lost_is_made_again(tmp_path: Path, lost: str) -> None:
    """Without its state, or with fewer rows than the state needs before it, a job begins with its first byte."""
    data = PROSE * 100
    name = interrupted(tmp_path, data)
    if lost == "state":
        shutil.rmtree(tmp_path / "data/states")
    else:
        vectors = next((tmp_path / "data/jobs/files").glob("*/*/vectors"))
        vectors.write_bytes(vectors.read_bytes()[:1000])
    with running_service(tmp_path, FakeEngine(), jobs=QUICK, store=StoreSettings()) as service:
        assert whole(service, name, data)
        assert service.engine.sessions.read == len(data)


def test_rows_of_another_model_are_not_put_behind_those_that_are_there(tmp_path: Path) -> None:
    """Where the engine has other weights when the job goes on, with a state or without, the job ends with words."""
    name = interrupted(tmp_path, PROSE * 400)
    other = msgspec.structs.replace(MANIFEST, model=msgspec.structs.replace(MANIFEST.model, weights="f" * 64))
    with running_service(tmp_path, FakeEngine(manifest=other), jobs=QUICK, store=StoreSettings()) as service:
        eventually(lambda: job(service.url, name)["status"] not in ("queued", "running"), "the job to end")
        ended = job(service.url, name)
        assert ended["status"] == "failed" and ended["error"]["code"] == "state_mismatch", ended
        assert "send the input again as a new job" in ended["error"]["message"]


def test_a_job_that_is_cancelled_while_it_waits_gives_its_state_back(tmp_path: Path) -> None:
    """Its state does not go on counting as its caller's for all the time that the job might have lived."""
    name = interrupted(tmp_path, PROSE * 100)
    quickly, away = StoreSettings(hold_s=0.1, upkeep_s=0.1), FakeEngine(ready=False)
    options = {"jobs": QUICK, "store": quickly, "engine_ready_seconds": 0}
    with running_service(tmp_path, away, **options) as service:
        eventually(lambda: job(service.url, name)["attempts"] == 3, "the job to be tried in vain")
        eventually(lambda: job(service.url, name)["status"] == "queued", "the job to wait")
        before = stored_states(service)
        assert httpx.post(f"{service.url}/v1/jobs/{name}/cancel").json()["status"] == "cancelled"
        eventually(lambda: stored_states(service) == before - 1, "its state to go")


def test_an_engine_that_dies_costs_what_lies_behind_the_last_state(tmp_path: Path) -> None:
    """The job waits for the next engine and goes on from its state there, in the same process."""
    data, engine = PROSE * 100, FakeEngine(credit=4000, stingy=True, keep=False)
    with running_service(tmp_path, engine, jobs=QUICK, checkpoint_tokens=1024) as service:
        name = httpx.post(f"{service.url}/v1/jobs?window=64", content=data).json()["id"]
        eventually(lambda: stands_at(tmp_path, name, 3072), "the last state to be kept")
        before, engine.stingy = engine.sessions.read, False
        (request,) = engine.sessions._open
        service.engine_port.inject(Failed(request, "engine_unreachable", "the controller is gone"))
        assert result(service.url, name)[-1]["tokens"] == len(data)
        assert engine.sessions.read - before == len(data) - 3072 and job(service.url, name)["attempts"] == 2
        assert whole(service, name, data)


def test_a_full_store_costs_only_the_states(tmp_path: Path) -> None:
    """A job whose states find no room is done without them, and the log says so."""
    data = PROSE * 100
    with running_service(
        tmp_path, FakeEngine(), jobs=QUICK, checkpoint_tokens=1024, store=StoreSettings(tenant_bytes=100)
    ) as service:
        name = httpx.post(f"{service.url}/v1/jobs?window=64", content=data).json()["id"]
        assert whole(service, name, data)
        assert any("was not kept" in line["event"] for line in service.log_lines())


def test_a_process_that_was_taken_for_dead_spoils_no_row(tmp_path: Path) -> None:
    """What it still writes while another one goes on lands where the same rows belong, and nothing follows them."""
    vectors_ND, ranges_N4 = np.arange(60, dtype=np.float32).reshape(12, 5), np.arange(48).reshape(12, 4)

    def block(first: int, stop: int) -> RowBlock:
        return RowBlock(first, ranges_N4[first:stop], vectors_ND[first:stop])

    stale, fresh = JobRowFile(tmp_path, 5), JobRowFile(tmp_path, 5)
    assert stale.begin(0) == 0
    stale.append(block(0, 5))
    assert stale.settle() == 5
    stale.append(block(5, 8))
    assert fresh.begin(5) == 5
    fresh.append(block(5, 10))
    assert fresh.settle() == 10
    stale.close()
    fresh.append(block(10, 12))
    assert fresh.settle() == 12
    fresh.close()
    found = fresh.read(0, 12)
    np.testing.assert_array_equal(found.vectors_ND, vectors_ND)
    np.testing.assert_array_equal(found.ranges_N4, ranges_N4)
    assert (tmp_path / "vectors").stat().st_size == 12 * 5 * 4

"""`kill -9` of the API process in the middle of jobs: the next one goes on, with the rows of an undisturbed run."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from dist_attn_service.jobs.catalogue import JobCatalogue, JobLimits

from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.raw_http import lines_of
from tests.support.service_process import running_process
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


def test_a_killed_service_goes_on_with_its_jobs(tmp_path: Path) -> None:
    """Rows that were safe stay, the others follow, none twice; a job whose input is lost or damaged says so."""
    engine, data = FakeEngine(credit=1000, stingy=True), bytes(range(97, 122)) * 200
    with fake_controller(engine, f"ipc://{tmp_path}/c") as address:
        with running_process(tmp_path, address) as (process, url):
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
            name, *damaged = (httpx.post(f"{url}/v1/jobs?window=100", content=data).json()["id"] for _ in range(5))
            eventually(lambda: _job(url, name)["progress"]["rows"] == 10, "the first rows to be safe")
            process.kill()
            process.wait(60)
        engine.stingy = False
        folder = tmp_path / "data/jobs/files"
        lost, half, longer, other = (folder / each[-2:] / each / "input" for each in damaged)
        lost.unlink()
        half.write_bytes(data[:2500])
        longer.write_bytes(data + b"\0")
        other.write_bytes(data[:2500] + b"\0" + data[2501:])
        with (folder / name[-2:] / name / "vectors").open("ab") as file:
            file.write(b"half a row")
        with running_process(tmp_path, address) as (_, url):
            eventually(lambda: _job(url, name)["status"] == "succeeded", "it to go on")
            done = _job(url, name)
            result = lines_of(httpx.get(f"{url}/v1/jobs/{name}/result").content)
            assert result == lines_of(httpx.post(f"{url}/v1/encodings?window=100", content=data).content)
            assert done["attempts"] == 2 and done["progress"]["rows"] == 50
            told = httpx.get(f"{url}/v1/jobs/{name}/events").text
            assert told.index("event: started") < told.index("event: resumed") < told.index("event: succeeded")
            assert '"rows":10' in told.split("event: resumed")[1]
            for each, words in zip(damaged, ("0 bytes", "2500 bytes", "5001 bytes", "5000 other bytes"), strict=True):
                eventually(lambda each=each: _job(url, each)["status"] == "failed", "the others to fail")
                error = _job(url, each)["error"]
                assert error["code"] == "input_lost" and "send it again" in error["message"]
                assert "5000 bytes were sent" in error["message"] and f"and {words} are" in error["message"]


def test_jobs_of_an_earlier_version_go_on(tmp_path: Path) -> None:
    """Their records know no digest of the input: one of the right length is worked on, one of another is lost."""
    data = bytes(range(97, 122)) * 200
    with fake_controller(FakeEngine(credit=1000, stingy=True), f"ipc://{tmp_path}/c") as address:
        with running_process(tmp_path, address) as (process, url):
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
            whole, half = (httpx.post(f"{url}/v1/jobs?window=100", content=data).json()["id"] for _ in range(2))
            process.kill()
            process.wait(60)
        asyncio.run(_forget_digests(tmp_path / "data", (whole, half)))
        (tmp_path / "data/jobs/files" / half[-2:] / half / "input").write_bytes(data[:2500])
    with (
        fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address) as (_, url),
    ):
        for name in (whole, half):
            eventually(lambda name=name: _job(url, name)["status"] in ("succeeded", "failed"), "it to end")
        assert (_job(url, whole)["status"], _job(url, half)["error"]["code"]) == ("succeeded", "input_lost")


async def _forget_digests(data: Path, names: tuple[str, ...]) -> None:
    """Make the records what an earlier version wrote."""
    catalogue = await JobCatalogue.open("", data / "jobs", JobLimits(1 << 30, 100, 15.0))
    for name in names:
        await catalogue.change(name, lambda record: msgspec.structs.replace(record, input_sha256=""))
    await catalogue.close()


def _job(url: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/jobs/{name}", timeout=60).json()
    return found

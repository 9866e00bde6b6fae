"""`kill -9` of the API process in the middle of jobs: the next one goes on, with the rows of an undisturbed run."""

from pathlib import Path
from typing import Any

import httpx

from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.raw_http import lines_of
from tests.support.service_process import running_process
from tests.support.service_server import eventually


def test_a_killed_service_goes_on_with_its_jobs(tmp_path: Path) -> None:
    """Rows that were safe stay, the others follow, none twice; a job whose input is gone says so."""
    engine, data = FakeEngine(credit=1000, stingy=True), bytes(range(97, 122)) * 200
    with fake_controller(engine, f"ipc://{tmp_path}/c") as address:
        with running_process(tmp_path, address) as (process, url):
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
            name, lost = (httpx.post(f"{url}/v1/jobs?window=100", content=data).json()["id"] for _ in range(2))
            eventually(lambda: _job(url, name)["progress"]["rows"] == 10, "the first rows to be safe")
            process.kill()
            process.wait(30)
        engine.stingy = False
        folder = tmp_path / "data/jobs/files"
        (folder / lost[-2:] / lost / "input").unlink()
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
            eventually(lambda: _job(url, lost)["status"] == "failed", "the other to fail")
            assert "send it again" in _job(url, lost)["error"]["message"]


def _job(url: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/jobs/{name}", timeout=60).json()
    return found

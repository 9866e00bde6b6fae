"""Over a real controller and rank: an API process that is killed in the middle costs one interval, and no bit."""

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from dist_attn.control.launch import start_engine
from tests.support.files import begin, patch
from tests.support.jobs import point_of
from tests.support.models import write_small_folder
from tests.support.programs import free_port, running_program
from tests.support.raw_http import lines_of
from tests.support.served import served
from tests.support.service_process import running_process
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually

SECONDS = 120.0
DATA = np.random.default_rng(3).integers(97, 123, 24_000).astype(np.uint8).tobytes()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """The folder of a service, a model folder, and a controller with one rank that runs it over the service's store."""
    folder = tmp_path_factory.mktemp("engine")
    model = write_small_folder(folder / "model" / "tiny")
    with start_engine(model=str(model), ranks=1, data_dir=str(folder / "data")) as handle:
        yield folder, model, handle.api_address


def ready(url: str) -> None:
    """Wait until the engine takes work."""
    eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the engine to be ready", SECONDS)


def read_by(url: str, kind: str) -> int:
    """Tokens that this process has had read."""
    told = httpx.get(f"{url}/metrics", timeout=60).text
    return int(float(told.split(f'dist_attn_tokens_total{{kind="{kind}"}} ')[1].split()[0]))


def test_a_job_goes_on_from_its_state(engine: tuple[Path, Path, str]) -> None:
    """The rows are those of an undisturbed encoding to the bit, and no token before the last state is read again."""
    (folder, model, address), data = (
        engine,
        4 * DATA,
    )  # so that a fast machine is not done with it when the state is seen
    with running_process(folder, address, model, checkpoint_tokens="1024") as (process, url):
        ready(url)
        name = httpx.post(f"{url}/v1/jobs?window=128", content=data, timeout=60).json()["id"]
        eventually(lambda: asyncio.run(point_of(folder / "data", name)) is not None, "a state", SECONDS)
        process.kill()
        process.wait(30)
    point = asyncio.run(point_of(folder / "data", name))
    assert point is not None and 0 < point.run.tokens < len(data) and point.run.tokens % 1024 == 0
    with running_process(folder, address, model, checkpoint_tokens="1024") as (_, url):
        place = f"{url}/v1/jobs/{name}"
        eventually(lambda: httpx.get(place, timeout=60).json()["status"] == "succeeded", "the job to end", SECONDS)
        assert read_by(url, "encoding") == len(data) - point.run.tokens
        rows = lines_of(httpx.get(f"{place}/result", timeout=60).content)
        whole = httpx.post(f"{url}/v1/encodings?window=128", content=data, timeout=SECONDS)
        assert rows == lines_of(whole.content)


def test_an_upload_goes_on_from_its_byte_and_its_state(engine: tuple[Path, Path, str]) -> None:
    """The session that it feeds is that of one append to the bit, and is free as soon as its writer is dead."""
    folder, model, address = engine
    with running_process(folder, address, model, checkpoint_tokens="4096") as (process, url):
        ready(url)
        session = SessionClient(url, seconds=SECONDS).make()
        named = base64.b64encode(session.encode()).decode()
        path = begin(url, len(DATA), **{"Upload-Metadata": f"session {named}"}).removeprefix(url)
        assert patch(url + path, 0, DATA[:16_000]).status_code == 204
        eventually(lambda: checkpoint(url + path) >= 8192, "states to be kept", SECONDS)
        process.kill()
        process.wait(30)
    with running_process(folder, address, model, checkpoint_tokens="4096") as (_, url):
        ready(url)
        kept = checkpoint(url + path)
        assert httpx.head(url + path, timeout=60).headers["upload-offset"] == "16000" and kept % 4096 == 0
        last = httpx.patch(
            url + path,
            headers={"Upload-Offset": "16000", "Content-Type": "application/offset+octet-stream"},
            content=DATA[16_000:],
            timeout=SECONDS,
        )
        assert last.status_code == 204 and last.headers["upload-session-position"] == str(len(DATA))
        assert read_by(url, "prompt") == len(DATA) - kept
        client = SessionClient(url, seconds=SECONDS)
        other = client.make()
        client.append(other, DATA)
        assert client.state(session).content == client.state(other).content


def test_serve_starts_an_api_again_that_was_killed(tmp_path: Path) -> None:
    """At the same address, where whoever comes meanwhile waits; what was acknowledged is there, and a job ends."""
    with served(tmp_path) as whole:
        client = SessionClient(whole.url, seconds=SECONDS)
        session = client.make()
        said = client.append(session, "Kept on disk. ", key="append")
        upload = begin(whole.url, 20)
        assert patch(upload, 0, b"of two parts").status_code == 204
        job = httpx.post(f"{whole.url}/v1/jobs?window=128", content=DATA, timeout=SECONDS).json()["id"]
        for kill in range(2):
            before = whole.parts()["api"]
            before.kill()
            before.wait(60)
            assert httpx.get(f"{whole.url}/livez", timeout=SECONDS).status_code == 200
            assert whole.parts()["api"].pid != before.pid, kill
        ready(whole.url)
        assert client.get(f"/v1/sessions/{session}").json()["position"] == said.position
        assert client.append(session, "Kept on disk. ", key="append").position == said.position
        assert httpx.head(upload, timeout=60).headers["upload-offset"] == "12"
        place = f"{whole.url}/v1/jobs/{job}"
        eventually(lambda: httpx.get(place, timeout=60).json()["status"] == "succeeded", "the job to end", SECONDS)
        assert whole.program.output.count("the API ended with exit code 137 and is started again") == 2
        assert whole.program.stop() == 0


def test_a_second_serve_on_one_data_folder_is_refused(tmp_path: Path) -> None:
    """It names the first one's process and address; after kill -9 of that the next one takes the folder over."""
    with served(tmp_path) as whole:
        flags = [f"--model={tmp_path}/tiny", f"--data-dir={whole.data}", f"--port={free_port()}"]
        command = [sys.executable, "-m", "dist_attn", "serve", *flags]
        second = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        holder = f"{whole.data} is the data folder of process {whole.program.process.pid} on "
        assert (second.returncode, second.stdout, second.stderr.count("\n")) == (2, "", 1)
        assert holder in second.stderr and f"at {whole.url};" in second.stderr
        assert httpx.get(f"{whole.url}/readyz", timeout=60).status_code == 200
        whole.program.process.kill()
        whole.program.process.wait(60)
        with running_program(command, tmp_path / "next.log") as program:
            program.wait_for("ready after", SECONDS)


def checkpoint(address: str) -> int:
    """Up to where the session has all."""
    return int(httpx.head(address, timeout=60).headers["upload-session-checkpoint"])

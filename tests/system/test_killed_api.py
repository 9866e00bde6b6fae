"""Over a real controller and ranks: an API process that is killed in the middle costs one interval, and no bit."""

import asyncio
import base64
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from dist_attn.control.launch import start_engine
from tests.support.files import begin, offset_of, patch
from tests.support.jobs import point_of
from tests.support.models import write_small_folder
from tests.support.raw_http import lines_of
from tests.support.service_process import running_process
from tests.support.session_processes import Api, api_process
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually

SECONDS, GRID = 120.0, 1024
TEXT = b"".join(b"Line %d of a text that is read while it is sent. " % n for n in range(400))
DATA = np.random.default_rng(3).integers(97, 123, 24_000).astype(np.uint8).tobytes()


@contextmanager
def engine(folder: Path, kind: str, ranks: int) -> Iterator[tuple[Path, str]]:
    """A model folder, and a controller with ranks that run it over the service's store."""
    model = write_small_folder(folder / "model" / "tiny", kind=kind)
    with start_engine(model=str(model), ranks=ranks, data_dir=str(folder / "data")) as handle:
        yield model, handle.api_address


def ready(url: str) -> None:
    """Wait until the engine takes work."""
    eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the engine to be ready", SECONDS)


def read_by(url: str, kind: str) -> int:
    """Tokens that this process has had read."""
    told = httpx.get(f"{url}/metrics", timeout=60).text
    return int(float(told.split(f'dist_attn_tokens_total{{kind="{kind}"}} ')[1].split()[0]))


def test_an_append_survives_the_process_that_does_it(tmp_path: Path) -> None:
    """`kill -9` in the middle of a text: another process over the store goes on from the last state, bit by bit; of two
    layers one has states of one size, and the other keys of all tokens over two ranks.
    """
    with ExitStack() as stack:
        model, address = stack.enter_context(engine(tmp_path, "hybrid", 2))
        where = (model, tmp_path / "data", tmp_path / "api.log", GRID)
        first, second = (stack.enter_context(api_process(address, *where)) for _ in range(2))
        straight = second.make("in peace")
        second.append(straight, TEXT, "k")
        session = first.make("killed")

        killed = threading.Event()

        def slowly() -> Iterator[bytes]:
            for at in range(0, len(TEXT), GRID):
                yield TEXT[at : at + GRID]
                killed.wait(0.05 if at < 6 * GRID else 30)

        def send() -> None:
            with pytest.raises(httpx.HTTPError):
                first.ask("POST", f"/v1/sessions/{session}/append", content=slowly(), headers={"idempotency-key": "k"})

        sending = threading.Thread(target=send)
        sending.start()

        def position(api: Api) -> int:
            found: int = api.ask("GET", f"/v1/sessions/{session}").json()["position"]
            return found

        eventually(lambda: position(second) >= 2 * GRID, "two states to be kept", 60)
        first.end(signal.SIGKILL)
        killed.set()
        sending.join(60)
        kept = position(second)
        assert kept >= 2 * GRID and kept % GRID == 0
        assert second.ask("GET", "/v1/status").json()["stored_sessions"] == 2
        eventually(lambda: not second.ask("GET", f"/v1/sessions/{session}").json()["busy"], "the session to be free")
        last = second.append(session, TEXT, "k")
        assert (last["restored_position"], last["start"], last["position"]) == (kept, 0, len(TEXT))
        assert (last["recomputed_tokens"], last["bit_exact"]) == (0, True)
        assert second.tag(session) == second.tag(straight)
        assert second.append(session, TEXT, "k")["replayed"] and second.tag(session) == second.tag(straight)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """An engine of one rank, whose rows have the same bits however a text is cut."""
    with engine(tmp_path, "rfa_gate", 1) as running:
        yield running


def test_a_job_and_an_upload_go_on_from_their_states(alone: tuple[Path, str], tmp_path: Path) -> None:
    """Rows are those of an undisturbed encoding to the bit, and the session that the upload feeds, which is free as
    soon as its writer is dead, is that of one append; no token before the last state is read again.
    """
    # So much of the job that a fast machine is not done with it when the state is seen.
    (model, address), data, folder = alone, 4 * DATA, tmp_path
    with running_process(folder, address, model, checkpoint_tokens=str(GRID)) as (process, url):
        ready(url)
        session = SessionClient(url, seconds=SECONDS).make()
        named = base64.b64encode(session.encode()).decode()
        path = begin(url, len(DATA), **{"Upload-Metadata": f"session {named}"}).removeprefix(url)
        assert patch(url + path, 0, DATA[:16_000]).status_code == 204
        eventually(lambda: checkpoint(url + path) >= 8192, "states to be kept", SECONDS)
        name = httpx.post(f"{url}/v1/jobs?window=128", content=data, timeout=60).json()["id"]
        eventually(lambda: asyncio.run(point_of(folder / "data", name)) is not None, "a state", SECONDS)
        process.kill()
        process.wait(30)
    point = asyncio.run(point_of(folder / "data", name))
    assert point is not None and 0 < point.run.tokens < len(data) and point.run.tokens % GRID == 0
    with running_process(folder, address, model, checkpoint_tokens=str(GRID)) as (_, url):
        ready(url)
        kept = checkpoint(url + path)
        assert offset_of(url + path) == 16_000 and kept >= 8192 and kept % GRID == 0
        last = patch(url + path, 16_000, DATA[16_000:])
        assert last.status_code == 204 and last.headers["upload-session-position"] == str(len(DATA))
        assert read_by(url, "prompt") == len(DATA) - kept
        client = SessionClient(url, seconds=SECONDS)
        other = client.make()
        client.append(other, DATA)
        assert client.state(session).content == client.state(other).content
        place = f"{url}/v1/jobs/{name}"
        eventually(lambda: httpx.get(place, timeout=60).json()["status"] == "succeeded", "the job to end", SECONDS)
        assert read_by(url, "encoding") == len(data) - point.run.tokens
        rows = lines_of(httpx.get(f"{place}/result", timeout=60).content)
        whole = httpx.post(f"{url}/v1/encodings?window=128", content=data, timeout=SECONDS)
        assert rows == lines_of(whole.content)


def checkpoint(address: str) -> int:
    """Up to where the session has all."""
    return int(httpx.head(address, timeout=60).headers["upload-session-checkpoint"])

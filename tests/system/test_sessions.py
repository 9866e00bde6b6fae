"""Sessions of a real model in real processes: killed in the middle, gone on elsewhere, restored by others."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.models import write_small_folder
from tests.support.session_processes import Api, api_process, engine
from tests.support.waiting import eventually

TEXT = b"".join(b"Line %d of a text that is read while it is sent. " % n for n in range(400))
GRID = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with states of one size in a layer, and keys of all tokens in the other."""
    return write_small_folder(tmp_path_factory.mktemp("model") / "tiny", kind="hybrid")


def test_an_append_survives_the_process_that_does_it(model: Path, tmp_path: Path) -> None:
    """`kill -9` in the middle of a text: another process over the store goes on from the last state, bit by bit."""
    where = (model, tmp_path / "data", tmp_path / "api.log", GRID)
    with engine(model, 2, tmp_path, tmp_path / "data") as address, ExitStack() as stack:
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
        assert kept % GRID == 0 and second.ask("GET", "/v1/status").json()["stored_sessions"] == 2
        eventually(lambda: not second.ask("GET", f"/v1/sessions/{session}").json()["busy"], "the session to be free")
        last = second.append(session, TEXT, "k")
        assert (last["restored_position"], last["start"], last["position"]) == (kept, 0, len(TEXT))
        assert (last["recomputed_tokens"], last["bit_exact"]) == (0, True)
        assert second.tag(session) == second.tag(straight)
        assert second.append(session, TEXT, "k")["replayed"] and second.tag(session) == second.tag(straight)


def test_a_session_says_what_a_completion_says(model: Path, tmp_path: Path) -> None:
    """Greedily, a text that was appended in parts goes on as a completion of the whole does."""
    with engine(model, 1, tmp_path, tmp_path / "data") as address, ExitStack() as stack:
        api = stack.enter_context(api_process(address, model, tmp_path / "data", tmp_path / "api.log", GRID))
        session = api.make("parts")
        for part in (TEXT[:700], TEXT[700:701], TEXT[701:2000]):
            api.append(session, part, "")
        body = {"prompt": TEXT[:2000].decode(), "max_tokens": 12, "temperature": 0}
        whole = api.ask("POST", "/v1/completions", json=body).json()["choices"][0]["text"]
        said = api.generate(session, 5)["choices"][0]["text"] + api.generate(session, 7)["choices"][0]["text"]
        assert said == whole

"""`dist-attn serve --encoder` with two real models: they work side by side, and the loss of one is its own."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dist_attn.settings import DataFolder
from tests.support.models import write_small_folder
from tests.support.programs import free_port, running_program
from tests.support.served import Served, served
from tests.support.waiting import eventually

BOOK = b"It was the best of times, it was the worst of times; " * 1000
HALF = 32_768  # ends with a chunk: a client that stays away after it gets the blocks of one that sends at once
SECONDS = 120.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`tiny` writes, `vectors` encodes."""
    folder = tmp_path_factory.mktemp("two")
    with served(folder, f"--encoder={write_small_folder(folder / 'vectors', seed=1)}") as running:
        yield running


def status(whole: Served) -> dict[str, Any]:
    """What the service says of both engines."""
    found: dict[str, Any] = httpx.get(f"{whole.url}/v1/status", timeout=SECONDS).json()
    return found


def rank_of(whole: Served, model: str) -> psutil.Process:
    """The one rank of a model."""
    ranks = [process for name, process in whole.parts().items() if name.startswith("rank")]
    (rank,) = [process for process in ranks if any(f"/{model}" in word for word in process.cmdline())]
    return rank


class Writing:
    """A completion that is streamed in a thread until it is told to leave."""

    def __init__(self, whole: Served) -> None:
        self.texts: list[str] = []
        self._url, self._leave = whole.url, threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Writing":
        self._thread.start()
        eventually(lambda: len(self.texts) > 10, "the stream to begin", SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Read no further: all that came is in `texts`."""
        self._leave.set()
        self._thread.join(SECONDS)

    def _read(self) -> None:
        body = {"prompt": "It was", "max_tokens": 65_536, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if self._leave.is_set():
                    return


def encode(whole: Served, pieces: Any) -> list[str]:
    """The lines of an encoding by whichever model it gets."""
    answer = httpx.post(f"{whole.url}/v1/encodings?window=100", content=pieces, timeout=SECONDS)
    return answer.text.splitlines()


def test_each_model_does_its_part(whole: Served) -> None:
    """Both are there, with ranks of their own, and the rows are those of the second one alone."""
    assert [card["id"] for card in httpx.get(f"{whole.url}/v1/models").json()["data"]] == ["tiny", "vectors"]
    assert sorted(name for name in whole.parts() if name.startswith("rank")) == ["rank 1", "rank 2"]
    assert json.loads(encode(whole, BOOK)[-1])["model"] == "vectors"
    by_writer = httpx.post(f"{whole.url}/v1/encodings?window=100&model=tiny", content=BOOK, timeout=SECONDS)
    assert by_writer.text.splitlines()[0] != encode(whole, BOOK)[0]


def test_a_lost_encoder_leaves_the_writer_alone(whole: Served) -> None:
    """kill -9 of its rank in a document: a completion is streamed meanwhile, and neither text nor rows are others."""
    undisturbed = encode(whole, BOOK)
    seen: list[int] = []

    def disturbed() -> Iterator[bytes]:
        yield BOOK[:HALF]
        eventually(lambda: status(whole)["encoder"]["sessions"] == 1, "the document to be under way", SECONDS)
        rank_of(whole, "vectors").kill()
        eventually(lambda: not status(whole)["encoder"]["ready"], "the loss to be noticed", SECONDS)
        seen.append(len(writing.texts))
        eventually(lambda: len(writing.texts) > seen[0] + 10, "more of the completion", SECONDS)
        assert not status(whole)["encoder"]["ready"] and httpx.get(f"{whole.url}/readyz").status_code == 503
        writing.leave()
        yield BOOK[HALF:]

    with Writing(whole) as writing:
        assert encode(whole, disturbed()) == undisturbed
        after = status(whole)
        assert (after["lost_groups"], after["encoder"]["lost_groups"]) == (0, 1)
        assert (after["epoch"], after["encoder"]["epoch"]) == (1, 2)
    text = "".join(writing.texts)
    body = {"prompt": "It was", "max_tokens": min(len(text.encode()), 65_536), "temperature": 0}
    again = httpx.post(f"{whole.url}/v1/completions", json=body, timeout=SECONDS).json()["choices"][0]["text"]
    assert again.startswith(text[:-4])  # what was cut off may end in the middle of a character


def test_the_data_folder_of_the_models_that_ship_is_closed_to_others(tmp_path: Path) -> None:
    """A folder of mode 755 is its owner's alone once `serve` has begun, and all that is in it is known by name."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    command = [sys.executable, "-m", "dist_attn", "serve", f"--port={free_port()}", f"--data-dir={data}"]
    with running_program(command, tmp_path / "serve.log") as program:
        program.wait_for("ready after", SECONDS)
        assert {path.name for path in data.iterdir()} <= set(DataFolder)
        assert data.stat().st_mode & 0o777 == 0o700
        assert program.output.count("open to other users") == 1  # a line that it was
        program.stop()

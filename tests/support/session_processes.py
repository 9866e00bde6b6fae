"""API processes over one store, before an engine of their own: what is ended, killed and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dist_attn.control.launch import start_engine
from tests.support.whole_service import LISTENS

SECONDS, START_S = 1800.0, 180.0
PIECE = 16 << 10


@dataclass
class Api:
    """One API process."""

    process: "subprocess.Popen[bytes]"
    url: str

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer to one request; anything but a success is an error."""
        answer = httpx.request(method, self.url + path, timeout=SECONDS, **options)
        answer.raise_for_status()
        return answer

    def make(self, name: str) -> str:
        """A new session."""
        return str(self.ask("POST", "/v1/sessions", json={"name": name}).json()["id"])

    def fork(self, session: str) -> str:
        """A fork of a session where it stands."""
        return str(self.ask("POST", f"/v1/sessions/{session}/fork").json()["id"])

    def append(self, session: str, text: bytes, key: str, pause_s: float = 0.0) -> dict[str, Any]:
        """The last line of an append, whose text is sent in pieces with pauses between them.

        Raises: httpx.HTTPError when the process ends; RuntimeError for an error line.
        """

        def pieces() -> Iterator[bytes]:
            for at in range(0, len(text), PIECE):
                yield text[at : at + PIECE]
                time.sleep(pause_s)

        headers = {"content-type": "text/plain", **({"idempotency-key": key} if key else {})}
        lines = self.ask("POST", f"/v1/sessions/{session}/append", content=pieces(), headers=headers).text.splitlines()
        last: dict[str, Any] = json.loads(lines[-1])
        if last["object"] != "session.append":
            raise RuntimeError(str(last))
        return last

    def generate(self, session: str, tokens: int) -> dict[str, Any]:
        """What the model goes on with, greedily, and how likely it was."""
        body = {"max_tokens": tokens, "temperature": 0, "logprobs": 2}
        found: dict[str, Any] = self.ask("POST", f"/v1/sessions/{session}/generate", json=body).json()
        return found

    def tag(self, session: str) -> str:
        """The digest of the newest state: of all its numbers, the last logits too."""
        return str(self.ask("GET", f"/v1/sessions/{session}/state").headers["etag"])

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        self.process.wait(60)


@contextmanager
def api_process(address: str, model: Path, folder: Path, log: Path, checkpoint_tokens: int) -> Iterator[Api]:
    """An API process over the store in `folder`, ready when the block begins."""
    command = [sys.executable, "-m", "dist_attn_service", "--port=0", f"--api-address={address}", f"--model={model}"]
    environment = {
        **os.environ,
        "DIST_ATTN_WORK__CHECKPOINT_TOKENS": str(checkpoint_tokens),
        "DIST_ATTN_STORE__WRITER_S": "2",
        "DIST_ATTN_WAITS__ENGINE_READY_SECONDS": str(START_S),
    }
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*command, f"--data-dir={folder}"], stdout=subprocess.PIPE, stderr=errors, env=environment
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := LISTENS.search(line.decode()):
                api = Api(process, found.group())
                break
        else:
            raise RuntimeError(f"the API did not start: {log.read_text()[-2000:]}")
        deadline = time.monotonic() + START_S
        while httpx.get(f"{api.url}/readyz").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        yield api
    finally:
        process.kill()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def engine(model: Path, ranks: int, folder: Path, data: Path) -> Iterator[str]:
    """A controller with its ranks, and where it listens; its store is that of API processes with this data folder."""
    with start_engine(model=str(model), ranks=ranks, data_dir=str(folder), store=str(data / "states")) as handle:
        yield handle.api_address

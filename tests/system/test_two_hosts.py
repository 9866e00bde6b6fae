"""The ranks of one service on two hosts, with keys between them: the same rows, and a host that is switched off.

python -m pytest -m slow tests/system/test_two_hosts.py      # needs root: network namespaces stand for hosts
"""

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from dist_attn.wire.curve import make_keys
from tests.support.models import write_small_folder
from tests.support.namespaces import Host, two_hosts
from tests.support.programs import Program, running_program
from tests.support.served import ROOT, served
from tests.support.waiting import eventually

PORT, RANK_PORT = 8000, 5556
START_SECONDS = 180.0
TEXT = bytes(np.random.default_rng(7).integers(32, 127, 40_000, dtype=np.uint8))


@dataclass
class TwoHosts:
    """A service with its controller on the first host, and an agent on each."""

    first: Host
    second: Host
    folder: Path
    model: Path
    stack: ExitStack
    started: list[Program] = field(default_factory=list)

    def start(self, name: str, host: Host, command: list[str], **variables: str) -> Program:
        """A program on one of the hosts."""
        env = {"DIST_ATTN_ENGINE__AGENT_NAME": name, "DIST_ATTN_MODEL": str(self.model), **variables}
        env |= {"DIST_ATTN_ENGINE__RANK_ADDRESS": f"tcp://{self.first.address}:{RANK_PORT}"}
        log = self.folder / f"{name}-{len(self.started)}.log"
        whole = [*host.prefix, sys.executable, "-m", *command]
        self.started.append(self.stack.enter_context(running_program(whole, log, cwd=ROOT, env=env)))
        return self.started[-1]

    def start_agent(self) -> Program:
        """The agent of the second host, which has its own keys alone."""
        return self.start(
            "second", self.second, ["dist_attn.control", "agent"], DIST_ATTN_ENGINE__KEYS_DIR=self.keys("b")
        )

    def keys(self, place: str) -> str:
        """The folder of keys of a host."""
        return str(self.folder / f"keys-{place}")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Ask the service; status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        with closing(connection):
            connection.sock = self.first.connect(PORT, START_SECONDS)
            headers = {"Content-Type": "text/plain"} if body is not None else {}
            connection.request(method, path, body, headers, encode_chunked=not isinstance(body, bytes | None))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def not_ready(self) -> str:
        """Why the service is not ready; empty when it is."""
        try:
            status, body = self.request("GET", "/readyz")
        except OSError as error:
            return str(error)
        return "" if status == 200 else str(json.loads(body)["detail"])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    """Two ranks on two hosts, ready."""
    make_keys(tmp_path / "keys-a")
    (tmp_path / "keys-b").mkdir()
    for name in ("agent.secret", "controller.public"):
        (tmp_path / "keys-a" / name).rename(tmp_path / "keys-b" / name)
        (tmp_path / "keys-a" / name).hardlink_to(tmp_path / "keys-b" / name)
    with two_hosts() as (first, second), ExitStack() as stack:
        two = TwoHosts(first, second, tmp_path, write_small_folder(tmp_path / "tiny"), stack)
        flags = ["serve", "--ranks=2", f"--port={PORT}", f"--data-dir={tmp_path}/data"]
        variables = {"DIST_ATTN_ENGINE__AGENTS": "2", "DIST_ATTN_ENGINE__KEYS_DIR": two.keys("a")}
        two.start("first", first, ["dist_attn", *flags], **variables)
        two.start_agent()
        eventually(lambda: not two.not_ready(), "both hosts", START_SECONDS)
        yield two


def rows_of(lines: str) -> list[list[float]]:
    """The vectors of an answer, which must end with its summary."""
    read = [json.loads(line) for line in lines.splitlines()]
    assert "tokens" in read[-1], read[-1]
    return [line["embedding"] for line in read if "embedding" in line]


def rows_of_one_host(folder: Path, model: Path) -> list[list[float]]:
    """What two ranks on one host make of the text."""
    with served(folder, ranks=2, model=model) as service:
        answer = httpx.post(f"{service.url}/v1/encodings?window=500", content=TEXT, timeout=START_SECONDS)
        return rows_of(answer.text)


def test_ranks_on_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    """The rows of one host to the last bit; a host that is switched off in mid-stream is named, its agent comes back,
    the stream goes on to the same rows; SIGTERM leaves no process on either host.
    """
    (tmp_path / "one").mkdir()
    wanted = rows_of_one_host(tmp_path / "one", hosts.model)
    assert len(wanted) == 80
    assert rows_of(hosts.request("POST", "/v1/encodings?window=500", TEXT)[1]) == wanted
    ranks = [[process for process in host.processes() if is_rank(process)] for host in (hosts.first, hosts.second)]
    for host, own in zip((hosts.first, hosts.second), ranks, strict=True):
        assert len(own) == 1
        assert {socket.rpartition(":")[0] for socket in host.listening()} <= {host.address, "127.0.0.1"}
    (url,) = {word.partition("=")[2] for own in ranks for word in own[0].cmdline() if word.startswith("--rendezvous=")}
    store = url.removeprefix("tcp://")  # on the host whose agent came first
    assert store in hosts.first.listening() + hosts.second.listening() and not store.startswith("127.")

    def text() -> Iterator[bytes]:
        yield TEXT[:16_000]
        hosts.second.switch_off()
        eventually(lambda: "agent of second" in hosts.not_ready(), "the loss to be named", START_SECONDS)
        assert "1 of 2 agents" in hosts.not_ready()
        hosts.start_agent()
        yield TEXT[16_000:]

    assert rows_of(hosts.request("POST", "/v1/encodings?window=500", text())[1]) == wanted
    for program in (hosts.started[0], hosts.started[-1]):
        assert program.stop() == 0, program.output
    eventually(lambda: not hosts.first.processes() and not hosts.second.processes(), "an end of all processes")


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a rank itself, not what launched it."""
    command = " ".join(process.cmdline())
    return "-m dist_attn.rank" in command and "tether" not in command

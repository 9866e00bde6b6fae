"""`dist-attn serve` as a whole: API, controller, agent and ranks as processes of their own."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.support.models import write_small_folder
from tests.support.programs import Program, free_port, running_program

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 120.0
ROLES = {
    "api": r"-m dist_attn_service\b",
    "controller": r"-m dist_attn\.control controller",
    "agent": r"-m dist_attn\.control agent",
    "rank": r"-m dist_attn\.rank --",
}
# These have the rank's command in their own: mpiexec for as long as it runs, a tether until it becomes the rank.
LAUNCHERS = r"mpiexec|rank_link\.tether"


@dataclass(frozen=True)
class Served:
    """Where it listens, what it is made of."""

    program: Program
    url: str
    data: Path

    def parts(self) -> dict[str, psutil.Process]:
        """The processes by role: api, controller, agent, rank 1, rank 2, …; ranks in order of their process ids."""
        found: dict[str, psutil.Process] = {}
        for process in sorted(self.program.family()[1:], key=lambda process: process.pid):
            command = " ".join(process.cmdline())
            role = next((role for role, pattern in ROLES.items() if re.search(pattern, command)), None)
            if role is not None and not re.search(LAUNCHERS, command):
                ranks = sum(name.startswith("rank") for name in found)
                found[f"rank {ranks + 1}" if role == "rank" else role] = process
        return found

    def listening(self) -> list[tuple[str, str]]:
        """Every TCP socket that listens, as the role of its process (or its command) and HOST:PORT."""
        roles = {process.pid: role for role, process in self.parts().items()}
        return [
            (roles.get(process.pid) or " ".join(process.cmdline()), f"{connection.laddr.ip}:{connection.laddr.port}")
            for process in self.program.family()
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]

    def status(self) -> dict[str, object]:
        """What /readyz says, empty while it is not ready."""
        answer = httpx.get(f"{self.url}/readyz", timeout=60)
        body: dict[str, object] = answer.json() if answer.status_code == 200 else {}
        return body


@contextmanager
def served(folder: Path, *more: str, ranks: int = 1, model: Path | None = None) -> Iterator[Served]:
    """Serve a small random model, ready when the block begins; everything is gone when it ends. `more` are flags."""
    model = model or write_small_folder(folder / "tiny")
    port, data = free_port(), folder / "data"
    flags = [f"--model={model}", f"--ranks={ranks}", f"--port={port}", f"--data-dir={data}"]
    command = [sys.executable, "-m", "dist_attn", "serve", *flags, *more]
    with running_program(command, folder / "serve.log", cwd=ROOT) as program:
        whole = Served(program, f"http://127.0.0.1:{port}", data)
        program.wait_for("ready after", READY_SECONDS)
        yield whole

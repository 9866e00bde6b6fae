"""Programs of their own, as an operator starts them: what they print goes to a file, and none is left behind."""

import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import eventually

STOP_SECONDS = 60.0
_NUMBERS = itertools.count(os.getpid())


@dataclass(frozen=True)
class Program:
    """A running program and the file with what it has printed."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """What it has printed so far, on stdout and stderr."""
        return self.log.read_text()

    def family(self) -> list[psutil.Process]:
        """The process and everything below it."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def wait_for(self, text: str, seconds: float) -> str:
        """Wait until a line holds `text`; that line."""

        def found() -> bool:
            assert self.process.poll() is None or text in self.output, self.output
            return text in self.output

        eventually(found, f"{text!r} of {self.log.name}", seconds)
        return next(line for line in self.output.splitlines() if text in line)

    def stop(self) -> int:
        """SIGTERM, as `docker stop` sends it; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


@contextmanager
def running_program(command: list[str], log: Path, **options: Any) -> Iterator[Program]:
    """Start it, and kill it with everything below it at the end if it still runs."""
    environment = {**os.environ, **options.pop("env", {})}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, **options
        )
    program = Program(process, log)
    try:
        yield program
    finally:
        if process.poll() is None:
            family = program.family()
            for member in family:
                with suppress(psutil.NoSuchProcess):  # it has ended since
                    member.kill()
            psutil.wait_procs(family, STOP_SECONDS)
        process.wait(STOP_SECONDS)


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and of a range from which neither the system nor another worker takes one."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + 2_000 * worker + next(_NUMBERS) % 2_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

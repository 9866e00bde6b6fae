"""The command line under test: in this process, or as one of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dist_attn.commands import cli
from tests.support.source_path import SOURCE_PATH

DEADLINE_S = 120.0
# As docs/how-to/many-processes.md has it for one host: nothing listens beyond loopback.
SAFE_TORCHRUN = [
    "torch.distributed.run",
    "--local-addr=127.0.0.1",
    "--rdzv-backend=c10d",
    "--rdzv-conf=store_type=file",
]


def run_here(monkeypatch: pytest.MonkeyPatch, place: Path, *arguments: str) -> int:
    """The exit code of `dist-attn` with these arguments in the folder `place`; its output is left to capsys."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["dist-attn", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def start_command(command: Sequence[str], place: Path) -> subprocess.Popen[str]:
    """A process of `python -m COMMAND` in this folder, its output in pipes."""
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process, which is killed at the deadline."""
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err

"""`python -m dist_attn_service` as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dist_attn.settings import settings_keys
from tests.support.service_server import model_folder

SECONDS = 120


def command(folder: Path, address: str, *more: str, model: Path | None = None) -> list[str]:
    """The command line of a service on any free port."""
    return [
        sys.executable, "-m", "dist_attn_service", "--port", "0", "--api-address", address,
        "--model", str(model or model_folder(folder)), "--data-dir", str(folder / "data"), *more,
    ]  # fmt: skip


def variable(name: str) -> str:
    """The environment variable of a setting."""
    key = next(key for key in settings_keys() if key.rpartition(".")[2] == name)
    return f"DIST_ATTN_{key.replace('.', '__').upper()}"


@contextmanager
def running_process(
    folder: Path, address: str, model: Path | None = None, **environment: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process and its URL, as it announced it; killed at the end if it still runs."""
    env = {**os.environ, **{variable(name): value for name, value in environment.items()}}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command(folder, address, model=model), stdout=subprocess.PIPE, stderr=log, text=True, env=env
        )
        try:
            assert process.stdout is not None
            announced = process.stdout.readline()
            assert announced.startswith("loading tiny, listening on http://127.0.0.1:"), (folder / "log").read_text()
            assert "Ctrl-C" in announced
            yield process, announced.split()[4]
        finally:
            process.kill()
            process.wait(SECONDS)
            process.stdout.close()

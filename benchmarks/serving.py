"""A service of a benchmark's own: `dist-attn serve` on a free port, stopped with everything below it at the end."""

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["own_service"]

LISTENS = re.compile(r"http://[^\s/]+:\d+")
STOP_S = 30


@contextmanager
def own_service(model: str, ranks: int, folder: Path, *flags: str) -> Iterator[str]:
    """Its address; data and log are in `folder`.

    Raises: RuntimeError when it does not start, with the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dist_attn", "serve", f"--port={port}", f"--ranks={ranks}", f"--model={model}"]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--data-dir={folder / 'data'}", *flags], stdout=subprocess.PIPE, stderr=log
        )
        try:
            assert process.stdout is not None
            found = next((hit for line in process.stdout if (hit := LISTENS.search(line.decode()))), None)
            if found is None:
                raise RuntimeError(f"the service did not start: {(folder / 'serve.log').read_text()[-2000:]}")
            yield found.group()
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

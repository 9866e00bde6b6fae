"""A service in processes of its own, for measurements that need one to themselves."""

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.programs import free_port

__all__ = ["ServiceProcess", "until_ready"]

LISTENS = re.compile(r"http://[^\s/]+:\d+")
END_S = 30.0


class ServiceProcess:
    """`dist-attn serve` on a free port, its log and its data in `folder`; `flags` are further ones.

    With `api_address` it is the API alone, before an engine that listens there.

    Raises: RuntimeError with the end of the log if it does not start.
    """

    def __init__(
        self, folder: Path, *, ranks: int, model: str, flags: tuple[str, ...] = (), api_address: str = ""
    ) -> None:
        where = [f"--port={free_port()}", f"--data-dir={folder / 'data'}", f"--model={model}"]
        program = ["dist_attn", "serve", f"--ranks={ranks}"]
        if api_address:
            program = ["dist_attn_service", f"--api-address={api_address}"]
        self._log = (folder / "serve.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *program, *where, *flags], stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._process.stdout is not None
        found = next(filter(None, (LISTENS.search(line.decode()) for line in self._process.stdout)), None)
        if found is None:
            raise RuntimeError(f"the service did not start: {(folder / 'serve.log').read_text()[-2000:]}")
        self.url = found.group()

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process that has started all others."""
        return self._process.pid

    def wait_until_ready(self, seconds: float) -> None:
        """Until its engine is.

        Raises: TimeoutError.
        """

        async def ready() -> None:
            async with httpx.AsyncClient(base_url=self.url) as http:
                await until_ready(http, 0, seconds)

        asyncio.run(ready())

    def stop(self) -> None:
        """End it, by force if need be."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


async def until_ready(http: httpx.AsyncClient, epoch: int, seconds: float) -> dict[str, Any]:
    """The status as soon as the engine is ready in this epoch or a later one.

    Raises: TimeoutError.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            status: dict[str, Any] = (await http.get("/v1/status")).json()
            if status["ready"] and (status["epoch"] or 0) >= epoch:
                return status
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the engine was not ready in epoch {epoch} within {seconds:g} s")

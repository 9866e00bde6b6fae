"""Asks /livez of the URL it is given until its input ends, then prints how long each answer took, as JSON.

A process of its own: what else the measuring program does must not count. Units: milliseconds.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

__all__ = ["asking_livez", "main"]

EVERY_S, LEAST = 0.02, 10


@contextmanager
def asking_livez(url: str) -> Iterator[list[float]]:
    """Ask from the first answer on until the block ends; the list has the waits afterwards."""
    waits: list[float] = []
    command = [sys.executable, "-m", "dist_attn_papers.service.livez", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield waits
        finally:
            process.stdin.close()
            waits += json.loads(process.stdout.readline())


def main(arguments: Sequence[str]) -> int:
    """The exit code: always 0."""
    over, waits = threading.Event(), list[float]()

    def until_the_input_ends() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=until_the_input_ends, daemon=True).start()
    with httpx.Client(base_url=arguments[0], timeout=60.0) as http:
        while not over.is_set() or len(waits) < LEAST:
            began = time.perf_counter()
            http.get("/livez").raise_for_status()
            waits.append(1e3 * (time.perf_counter() - began))
            if len(waits) == 1:
                print("begun", flush=True)
            time.sleep(EVERY_S)
    print(json.dumps(waits))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

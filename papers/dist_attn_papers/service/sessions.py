"""Sessions that outlive processes: is a restored state the same bits, a fork quick, and a retried append fed once?

`dist-attn bench service-sessions --model books-6m --tokens 1000000 --kills 20` starts an engine and API processes
of its own over one store on disk. It measures

* restore: a text is read, every process is ended, others are started, and both the text that is generated from the
  stored state and the state after it must have the bits of a run that was never interrupted;
* fork: how long it takes to fork the session of that text;
* retries: appends whose API process is killed (SIGKILL) at a random moment are sent again with their key to another
  process over the same store, and in the end the state must have the bits of one that was appended in peace.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from dist_attn.shipped import resolve_model_folder
from tests.support.session_processes import PIECE, SECONDS, Api, api_process, engine

__all__ = ["main", "measure"]

RETRY_S = 300.0


@dataclass(frozen=True)
class Restored:
    """What a restore in new processes came to."""

    tokens: int
    recomputed_tokens: int
    bit_exact: bool
    reason: str
    same_text_and_logprobs: bool
    same_state: bool


def restored(api: Api, session: str, undisturbed: dict[str, Any], tag: str, tokens: int) -> Restored:
    """Generate again from a fork that was made before the processes ended."""
    again = api.generate(session, tokens)
    said = again["session"]
    return Restored(
        said["restored_position"],
        said["recomputed_tokens"],
        said["bit_exact"],
        said["reason"],
        again["choices"] == undisturbed["choices"],
        api.tag(session) == tag,
    )


def forks(api: Api, session: str, count: int) -> dict[str, Any]:
    """How long forks take, and whether a fork that is appended to touches what it came from."""
    before, times = api.tag(session), []
    made = []
    with httpx.Client(base_url=api.url, timeout=SECONDS) as http:  # one connection: the fork, not the handshake
        for _ in range(count):
            began = time.perf_counter()
            answer = http.post(f"/v1/sessions/{session}/fork")
            times.append(1000 * (time.perf_counter() - began))
            made.append(answer.json()["id"])
    for name in made[:2]:
        api.append(name, f"only in {name}".encode(), "k")
    tags = {api.tag(made[0]), api.tag(made[1]), api.tag(session)}
    times.sort()
    return {
        "forks": count,
        "milliseconds_median": round(median(times), 2),
        "milliseconds_p99": round(times[min(count - 1, int(0.99 * count))], 2),
        "apart": len(tags) == 3 and api.tag(session) == before,
    }


@dataclass
class Retries:
    """Appends whose API process was killed in the middle."""

    kills: int = 0
    attempts: int = 0
    restored_in_the_middle: int = 0
    equal: int = 0
    different: int = 0


def retried(apis: "Replicas", session: str, text: bytes, key: str, chance: random.Random, pause_s: float) -> bool:
    """Append while the process that does it is killed, and again until it is done; whether it went on half done."""
    timer = threading.Timer(chance.uniform(0.2, 1.0) * len(text) / PIECE * pause_s, apis.kill)
    timer.start()
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            last = apis.current.append(session, text, key, pause_s)
        except (httpx.HTTPError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            timer.join()
            time.sleep(0.2)  # the session is free once its writer has been silent for two seconds
            continue
        timer.cancel()
        timer.join()
        return bool(last["restored_position"] > last["start"])


class Replicas:
    """Two API processes over one store: when one is killed, the other takes its place."""

    def __init__(self, stack: ExitStack, *where: Any) -> None:
        self._stack, self._where = stack, where
        self.kills = 0
        self.current, self._spare = self._start(), self._start()

    def kill(self) -> None:
        """SIGKILL."""
        self.current.end(signal.SIGKILL)
        self.current = self._spare
        self.kills += 1

    def complete(self) -> None:
        """See that there are two again."""
        if self.current is self._spare:
            self._spare = self._start()

    def _start(self) -> Api:
        return self._stack.enter_context(api_process(*self._where))


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All three, over one store."""
    model, data, chance = resolve_model_folder(given.model), folder / "data", random.Random(given.seed)
    log = folder / "api.log"
    text = given.text.read_bytes() if given.text else _words(chance, given.tokens * given.bytes_per_token)
    text = text[: given.tokens * given.bytes_per_token]
    result: dict[str, Any] = {}
    with engine(model, given.ranks, folder / "engine", data) as address, ExitStack() as stack:
        api = stack.enter_context(api_process(address, model, data, log, given.checkpoint_tokens))
        session = api.make("long")
        began = time.perf_counter()
        read = api.append(session, text, "whole")
        result["append"] = {"tokens": read["tokens"], "seconds": round(time.perf_counter() - began, 2)}
        result["fork"] = forks(api, session, given.forks)
        kept, straight = api.fork(session), api.fork(session)
        undisturbed = api.generate(straight, given.draws)
        tag = api.tag(straight)
        api.end()
    with engine(model, given.ranks, folder / "engine", data) as address, ExitStack() as stack:
        apis = Replicas(stack, address, model, data, log, given.checkpoint_tokens)
        result["restore"] = asdict(restored(apis.current, kept, undisturbed, tag, given.draws))
        retries, part = Retries(), text[: given.retry_bytes]
        peace = apis.current.make("peace")
        apis.current.append(peace, part, "k")
        wanted = apis.current.tag(peace)
        for number in range(given.kills):
            apis.complete()
            name = apis.current.make(f"retried {number}")
            retries.restored_in_the_middle += retried(apis, name, part, "k", chance, given.pause_ms / 1000)
            same = apis.current.tag(name) == wanted
            retries.equal, retries.different = retries.equal + same, retries.different + (not same)
        retries.kills = apis.kills
        retries.attempts = given.kills
        result["retries"] = asdict(retries)
    return result


def _words(chance: random.Random, size: int) -> bytes:
    words = ["the", "best", "of", "times", "worst", "age", "season", "light", "darkness", "spring", "hope", "winter"]
    parts, length = [], 0
    while length < size:
        parts.append(chance.choice(words))
        length += len(parts[-1]) + 1
    return " ".join(parts).encode()[:size]


def holds(result: dict[str, Any], fork_ms: float) -> bool:
    """Whether every promise was kept."""
    restore, retries, fork = result["restore"], result["retries"], result["fork"]
    return bool(
        restore["recomputed_tokens"] == 0
        and restore["bit_exact"]
        and restore["same_text_and_logprobs"]
        and restore["same_state"]
        and fork["apart"]
        and fork["milliseconds_median"] < fork_ms
        and retries["different"] == 0
    )


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when every promise was kept, else 1."""
    parser = argparse.ArgumentParser(
        prog="dist-attn bench service-sessions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="books-6m")
    parser.add_argument("--text", type=Path, help="a file to read; without it words at random")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the text, as far as bytes per token tell")
    parser.add_argument("--bytes-per-token", type=int, default=4)
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--forks", type=int, default=50)
    parser.add_argument("--fork-ms", type=float, default=50.0, help="a fork's median that counts as kept")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--retry-bytes", type=int, default=400_000, help="of each append that is killed")
    parser.add_argument("--pause-ms", type=float, default=50.0, help="between its pieces of 16 KB")
    parser.add_argument("--checkpoint-tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(given, Path(folder))
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1))
    return int(not holds(result, given.fork_ms))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

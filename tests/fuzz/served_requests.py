"""Drawn requests to a whole service over two ranks: no 5xx, no lost rank, no traceback, whatever anybody sends.

    python -m tests.fuzz.served_requests --requests 200000 --record drawn.jsonl

Each round has a seed of its own and a service that is started for it. It draws requests of the service's own OpenAPI
text (`described_requests`), states with sound digests and wild values that are put into sessions and gone on from
(`wild_states`), and model folders with wild values (`wild_folders`), which are read in this process.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fuzz import wild_folders
from tests.fuzz.described_requests import examine
from tests.fuzz.wild_states import wild
from tests.support.models import write_small_folder
from tests.support.served import Served, served

__all__ = ["Round", "one_round"]

SECONDS = 300.0  # that a request may take, on a machine with other work too
SETTINGS = """
[limits]
max_tokens = 48
[jobs]
per_caller = 1000000
[files]
caller_files = 1000000
caller_bytes = 1000000000000
all_bytes = 1000000000000
[store]
tenant_sessions = 1000000
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ODD_TEXTS = ("", "a", "\x00", "\ufeff", "é" * 300, "\u0301" * 200, "🙂", "<|endoftext|>", "x" * 5000, "\r\n", "\ud7ff")


@dataclass
class Round:
    """What one seed came to; `findings` in words."""

    seed: int
    described: int = 0
    states: int = 0
    folders: int = 0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that was drawn."""
        return self.described + self.states + self.folders


def _put_states(url: str, count: int, seed: int, found: Round) -> None:
    """Put drawn states into new sessions, and ask of each some of what can be asked of a session."""
    rng, sound = random.Random(seed), list[bytes]()
    with httpx.Client(base_url=url, timeout=SECONDS) as client:

        def ask(method: str, path: str, **options: Any) -> httpx.Response:
            answer = client.request(method, path, **options)
            found.states += 1
            found.statuses[answer.status_code] += 1
            if answer.status_code >= 500 or b'"server_error"' in answer.content:
                found.findings.append(f"{method} {path}: {answer.status_code} {answer.text[-300:]}")
            return answer

        for length in (1, 40, 700):
            session = ask("POST", "/v1/sessions").json()["id"]
            ask("POST", f"/v1/sessions/{session}/append", json={"input": "some text. " * length})
            sound.append(ask("GET", f"/v1/sessions/{session}/state").content)
        for _ in range(count):
            path = f"/v1/sessions/{ask('POST', '/v1/sessions').json()['id']}"
            put = ask("PUT", f"{path}/state", content=wild(rng.choice(sound), rng))
            if put.status_code != 200:
                continue
            drawing = {
                "max_tokens": rng.choice((1, 3, 48)),
                "temperature": rng.choice((0, 1, 1e-300, 2)),
                "top_p": rng.choice((1, 1e-9)),
                "logprobs": rng.choice((None, 0, 5)),
                "seed": rng.choice((None, 0, -(1 << 63), (1 << 63) - 1)),
                "stop": rng.choice((None, "a", ["\n", "🙂"])),
                "stream": rng.choice((False, True)),
            }
            asked: list[tuple[str, str, dict[str, Any]]] = [
                ("POST", "/generate", {"json": drawing}),
                ("POST", "/append", {"content": (rng.choice(ODD_TEXTS) * rng.choice((1, 9))).encode()}),
                ("POST", "/fork", {"json": {}}),
                ("GET", "/state", {}),
            ]
            for method, what, options in rng.sample(asked, rng.choice((1, 2, 3))):
                ask(method, path + what, **options)
            ask("DELETE", path)


def _look_at(whole: Served, found: Round) -> None:
    """The ranks, and what was logged."""
    status = httpx.get(f"{whole.url}/v1/status", timeout=SECONDS).json()
    if status["lost_groups"] or not status["ready"]:
        found.findings.append(f"{status['lost_groups']} groups of ranks were lost; ready: {status['ready']}")
    log = whole.program.output
    if "Traceback" in log:
        found.findings.append(log[log.index("Traceback") :][:2000])
    found.findings += [line for line in log.splitlines() if '"level": "error"' in line][:5]


def one_round(folder: Path, seed: int, *, examples: int, share: int, states: int, folders: int) -> Round:
    """Serve a small model, and draw so many of each."""
    found, began = Round(seed), time.monotonic()
    model = write_small_folder(folder / "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "settings.toml").write_text(SETTINGS)
    with served(folder, f"--config={folder / 'settings.toml'}", ranks=2, model=model) as whole:
        if examples or share:
            outcome = examine(whole.url, examples=examples, share=share, seed=seed, seconds=SECONDS)
            found.described = outcome.requests
            for (_, _, code), count in outcome.answers.items():
                found.statuses[code] += count
            found.findings += [f"{label}: {name}\n{text}" for (label, name), text in outcome.findings.items()]
        _put_states(whole.url, states, seed, found)
        _look_at(whole, found)
        if whole.program.stop():
            found.findings.append("the service did not end with 0")
    outcomes = wild_folders.run(folders, seed) if folders else Counter[str]()
    found.folders = folders
    found.findings += [words for words in outcomes if words.startswith(wild_folders.ERROR)]
    found.seconds = time.monotonic() - began
    return found


def main(arguments: list[str]) -> int:
    """The exit code: 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000, help="rounds are begun until so many were drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next one")
    parser.add_argument("--examples", type=int, default=60, help="random requests per operation and kind in a round")
    parser.add_argument("--share", type=int, default=1, help="every so manyth case at the edges")
    parser.add_argument("--states", type=int, default=500, help="states in a round")
    parser.add_argument("--folders", type=int, default=1000, help="model folders in a round")
    parser.add_argument("--record", type=Path, help="a file to which each round adds a line of JSON")
    options = parser.parse_args(arguments)
    per_round = {name: getattr(options, name) for name in ("examples", "share", "states", "folders")}
    wild_folders.bound_memory()
    drawn, found, seconds, seed = 0, 0, 0.0, options.seed
    while drawn < options.requests:
        with tempfile.TemporaryDirectory() as folder:
            this = one_round(Path(folder), seed, **per_round)
        drawn, found, seconds = drawn + this.requests, found + len(this.findings), seconds + this.seconds
        line = {**vars(this), "statuses": dict(sorted(this.statuses.items()))}
        if options.record is not None:
            with options.record.open("a") as file:
                print(json.dumps(line), file=file)
        print("\n".join(f"== seed {seed}: {words}" for words in this.findings), flush=True)
        print({**line, "findings": len(this.findings)}, f"{this.requests / this.seconds:.0f} a second", flush=True)
        seed += 1
    print(f"{drawn} drawn in {seconds:.0f} s from seeds {options.seed} to {seed - 1}, {found} findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

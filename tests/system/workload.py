"""A mix of requests as clients send them, each checked as far as its answer is known beforehand."""

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

SECONDS = 60.0
WORDS = b"It was the best of times, it was the worst of times. "
DOCUMENT = WORDS * 300
PROMPTS = ("Call me", "It was", "No more")


class Workload:
    """Threads that send requests until they are told to stop; what went wrong is kept."""

    def __init__(self, url: str, threads: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(threads)]
        self._jobs = (self.windows, self.rows, self.document, self.completion, self.stream, self.leave, self.break_off)

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Let requests that are under way end, and wait for it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)
        assert not any(thread.is_alive() for thread in self._threads), "a request did not end"

    def _work(self, seed: int) -> None:
        draw = random.Random(seed)
        # Every kind comes up in turn, each thread beginning elsewhere, so that a short run has all of them too.
        start = seed * len(self._jobs) // len(self._threads)
        with httpx.Client(base_url=self._url, timeout=SECONDS) as client:
            for job in itertools.cycle(self._jobs[start:] + self._jobs[:start]):
                if self._stop.is_set():
                    break
                try:
                    tokens = job(client, draw)
                except Exception as error:  # whatever it is, the test is to show it and to go on
                    self.errors.append(f"{job.__name__}: {type(error).__name__}: {error}")
                    time.sleep(0.1)  # a service that refuses everything at once is not to be hammered
                    continue
                with self._lock:
                    self.counts[job.__name__] += 1
                    self.tokens += tokens

    # ---- what is sent --------------------------------------------------------------------------

    def windows(self, client: httpx.Client, draw: random.Random) -> int:
        """A document of any length, sent in pieces; a row per window."""
        length, window = draw.randrange(1, 60_000), draw.choice((64, 512, 1000))
        data = (WORDS * (length // len(WORDS) + 1))[:length]

        def pieces() -> Iterator[bytes]:
            start = 0
            while start < length:
                stop = start + draw.randrange(1, 20_000)
                yield data[start:stop]
                start = stop

        answer = client.post("/v1/encodings", params={"window": window}, content=pieces())
        self._check_rows(answer, length, -(-length // window))
        return length

    def rows(self, client: httpx.Client, draw: random.Random) -> int:
        """A row per token."""
        length = draw.randrange(1, 2000)
        answer = client.post("/v1/encodings", params={"granularity": "token"}, content=DOCUMENT[:length])
        self._check_rows(answer, length, length)
        return length

    def document(self, client: httpx.Client, draw: random.Random) -> int:
        """The same document again gives the same vector."""
        answer = client.post("/v1/encodings", params={"granularity": "document"}, content=DOCUMENT)
        lines = self._check_rows(answer, len(DOCUMENT), 1)
        self._same("document", [round(value, 3) for value in lines[0]["embedding"]])
        return len(DOCUMENT)

    def completion(self, client: httpx.Client, draw: random.Random) -> int:
        """The same prompt and seed again give the same text."""
        prompt, count = draw.choice(PROMPTS), draw.choice((1, 20, 60))
        body = {"prompt": prompt, "max_tokens": count, "seed": 7, "temperature": 0.8}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        self._same(f"{prompt}/{count}", answer.json()["choices"][0]["text"])
        return int(answer.json()["usage"]["total_tokens"])

    def stream(self, client: httpx.Client, draw: random.Random) -> int:
        """A stream ends with a reason and [DONE]."""
        count = draw.randrange(1, 100)
        body = {"prompt": draw.choice(PROMPTS), "max_tokens": count, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-1]
        reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons[-1] in ("length", "stop"), reasons[-1]
        return count

    def leave(self, client: httpx.Client, draw: random.Random) -> int:
        """A client that goes away in the middle of a long completion."""
        body = {"prompt": draw.choice(PROMPTS), "max_tokens": 20_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for count, _ in enumerate(answer.iter_lines()):
                if count >= 10:
                    break
        return 10

    def break_off(self, client: httpx.Client, draw: random.Random) -> int:
        """A client that goes away in the middle of its document."""

        class Gone(Exception):
            pass

        def pieces() -> Iterator[bytes]:
            yield WORDS * draw.randrange(1, 100)
            raise Gone

        try:
            client.post("/v1/encodings", content=pieces())
        except Gone:
            return 0
        raise AssertionError("an answer came before the document had ended")

    # ---- what is asked of the answers ----------------------------------------------------------

    def _check_rows(self, answer: httpx.Response, tokens: int, rows: int) -> list[dict[str, Any]]:
        assert answer.status_code == 200, answer.text
        lines = [json.loads(line) for line in answer.text.splitlines()]
        last = lines[-1]
        assert last["object"] == "encoding.summary", last
        assert (last["tokens"], last["rows"], len(lines) - 1) == (tokens, rows, rows), last
        assert [line["index"] for line in lines[:-1]] == list(range(rows))
        return lines

    def _same(self, key: str, value: Any) -> None:
        with self._lock:
            first = self._known.setdefault(key, value)
        assert value == first, f"{key} differs: first {str(first)[:80]}, now {str(value)[:80]}"

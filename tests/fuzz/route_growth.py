"""The routes of a service that runs, asked with n and 2n bytes of texts that are hard to read; nobody may wait for it.

    python -m tests.fuzz.route_growth [--bytes 262144] [--only NAME]

It starts `dist-attn serve` with the models that ship, and prints for each route and text the status, the processor's
time of the API at n and 2n bytes, how many times as long that is, and how long /livez took at worst meanwhile. Where
the engine reads the text too, n is an eighth. The exit code is 1 where the time has grown more than 2.5 times, or an
answer is a 5xx; waits depend on what else the machine does, and are told alone.
"""

import argparse
import gzip
import json
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from dist_attn.shipped import DEFAULT_ENCODER, DEFAULT_MODEL, SHIPPED
from tests.fuzz.growth import MOST_GROWTH, UNITS, text_of
from tests.support.served import Served, served

__all__ = ["ROUTES", "Outcome", "examine"]

HARD = ("prose", "words", "marks", "blanks", "lines", "stops and blanks", "brackets", "han", "families", "zeros")
LEAST_SECONDS, TRIES = 0.25, 6  # of the processor, whose clock counts hundredths
ENGINE_SHARE = 8
TEXT, OCTETS, JSON = "text/plain", "application/octet-stream", "application/json"
Headers = dict[str, str]


class Sent(NamedTuple):
    """A request."""

    path: str
    body: bytes
    headers: Headers
    method: str = "POST"


def _json(path: str, **body: object) -> Sent:
    return Sent(path, json.dumps(body, ensure_ascii=False).encode(), {"content-type": JSON})


def _form(text: str) -> Sent:
    request = httpx.Request("POST", "http://x", data={"purpose": "user_data"}, files={"file": ("a.txt", text)})
    return Sent("/v1/files", request.read(), {"content-type": request.headers["content-type"]})


def _form_head(text: str) -> Sent:
    body = b"--b\r\nContent-Disposition: " + text.encode()[:4000].replace(b"\r\n", b"  ") + b"\x01\r\n\r\n"
    return Sent("/v1/files", body + text.encode(), {"content-type": "multipart/form-data; boundary=b"})


def _packed(text: str) -> Sent:
    data = text.encode()
    body = b"".join(gzip.compress(data[at : at + 64]) for at in range(0, len(data), 64))
    return Sent("/v1/estimate", body, {"content-type": TEXT, "content-encoding": "gzip"})


def _empty_members(text: str) -> Sent:
    body = gzip.compress(b"a") + gzip.compress(b"") * (len(text.encode()) // 20)
    return Sent("/v1/estimate", body, {"content-type": TEXT, "content-encoding": "gzip"})


def _state(text: str) -> Sent:
    tag = text.encode("ascii", "replace").decode().translate(dict.fromkeys(range(32), " "))
    headers = {"content-type": OCTETS, "if-match": f"x{tag[: 1 << 14]}x", "content-digest": f",{tag[: 1 << 14]}x"}
    return Sent("/v1/sessions/SESSION/state", text.encode(), headers, "PUT")


def _resumable(text: str) -> Sent:
    headers = {"tus-resumable": "1.0.0", "content-type": "application/offset+octet-stream"}
    headers |= {"upload-length": str(len(text.encode())), "upload-metadata": "filename " + b64encode(b"a.txt").decode()}
    return Sent("/v1/uploads", text.encode(), headers)


class Route(NamedTuple):
    """What is sent of a text; `engine`: it is read there too."""

    sent: Callable[[str], Sent]
    engine: bool = False


def _search(**more: object) -> Callable[[str], Sent]:
    return lambda text: _json("/v1/search", **{"query": "a", "documents": [text], "mode": "lexical", **more})


ROUTES: Mapping[str, Route] = {
    "documents": Route(lambda text: Sent("/v1/encodings", text.encode(), {"content-type": TEXT}), engine=True),
    "documents by sentence": Route(_search(granularity="sentence")),
    "documents by paragraph": Route(_search(granularity="paragraph")),
    "whole documents": Route(_search(granularity="document")),
    "queries": Route(lambda text: _json("/v1/search", query=text[:8192], documents=["a b c"], mode="lexical")),
    "reranked": Route(lambda text: _json("/v1/rerank", query="a", documents=[f"a{text}"]), engine=True),
    "embeddings": Route(lambda text: _json("/v1/embeddings", input=f"a{text}"), engine=True),
    "tokens": Route(lambda text: _json("/tokenize", prompt=text)),
    "tokens of the encoder": Route(lambda text: _json("/tokenize", prompt=text, model="minilm-stream")),
    "estimates": Route(lambda text: Sent("/v1/estimate", text.encode(), {"content-type": TEXT})),
    "prompts": Route(lambda text: _json("/v1/completions", prompt=text, max_tokens=1), engine=True),
    "chats": Route(
        lambda text: _json("/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=1),
        engine=True,
    ),
    "templates": Route(
        lambda text: _json(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] * 2,
            chat_template_kwargs={"documents_text": text, "lists": [[text[:9]]] * (len(text) // 64)},
            max_tokens=1,
        ),
        engine=True,
    ),
    "JSON of any kind": Route(lambda text: Sent("/v1/completions", text.encode(), {"content-type": JSON})),
    "JSON of lists": Route(
        lambda text: Sent("/v1/completions", b'{"prompt":[' + b"[1]," * (len(text.encode()) // 4) + b"[1]]}", {})
    ),
    "JSON of keys": Route(
        lambda text: _json("/v1/search", query="a", documents=[dict.fromkeys(map(str, range(len(text) // 8)))])
    ),
    "resumable uploads": Route(_resumable),
    "forms": Route(_form),
    "heads of forms": Route(_form_head),
    "gzip of small members": Route(_packed),
    "gzip of empty members": Route(_empty_members),
    "states": Route(_state),
}


@dataclass
class Outcome:
    """Of one route and text: the last status, seconds of the processor at n and 2n, and the longest wait for /livez."""

    route: str
    text: str
    size: int
    status: int = 0
    once: float = float("inf")
    twice: float = float("inf")
    waited: float = 0.0

    @property
    def growth(self) -> float:
        """How many times as long twice the text takes; 0 where it takes no time worth the name."""
        return self.twice / max(self.once, 0.01) if self.twice >= LEAST_SECONDS else 0.0

    @property
    def wrong(self) -> bool:
        """Whether it may not be so."""
        return self.growth > MOST_GROWTH or self.status >= 500

    def __str__(self) -> str:
        times = f"{self.growth:.1f} times" if self.growth else "short"
        what = f"{self.route}, {self.text}"
        took = f"{self.once:6.2f} s, {self.twice:6.2f} s, {times:9}"
        return (
            f"{what:42} {self.size:8} B  {self.status}  {took}  /livez {1000 * self.waited:5.0f} ms{'  !' * self.wrong}"
        )


@contextmanager
def _watched(port: int) -> Iterator[list[float]]:
    """How long /livez took, each on a connection of its own, while the block ran; the longest time stands first."""
    waits, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            began = time.perf_counter()
            connection = HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request("GET", "/livez")
            connection.getresponse().read()
            connection.close()
            waits[0] = max(waits[0], time.perf_counter() - began)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield waits
    finally:
        ended.set()
        thread.join()


def _send(whole: Served, api: psutil.Process, session: str, sent: Sent) -> tuple[int, float]:
    """The status of the answer, and the seconds of the API's processor until its end."""
    before = sum(api.cpu_times()[:2])
    path = sent.path.replace("SESSION", session)
    answer = httpx.request(sent.method, whole.url + path, content=sent.body, headers=sent.headers, timeout=600)
    return answer.status_code, sum(api.cpu_times()[:2]) - before


def _measure(whole: Served, api: psutil.Process, session: str, outcome: Outcome, route: Route) -> None:
    unit = UNITS[outcome.text]
    short, long = (route.sent(text_of(unit, size)) for size in (outcome.size, 2 * outcome.size))
    with _watched(int(whole.url.rpartition(":")[2])) as waits:
        for _ in range(TRIES):
            outcome.once = min(outcome.once, _send(whole, api, session, short)[1])
            outcome.status, took = _send(whole, api, session, long)
            outcome.twice = min(outcome.twice, took)
            if outcome.growth <= MOST_GROWTH:
                break
    outcome.waited = waits[0]


def examine(whole: Served, size: int, only: str = "", texts: tuple[str, ...] = HARD) -> Iterator[Outcome]:
    """Each route with each of the texts."""
    api = whole.parts()["api"]
    session = httpx.post(f"{whole.url}/v1/sessions", json={}, timeout=600).json()["id"]
    httpx.post(f"{whole.url}/v1/sessions/{session}/append", json={"input": "a"}, timeout=600).raise_for_status()
    for name, route in ROUTES.items():
        for text in texts:
            if only in name:
                outcome = Outcome(name, text, size // ENGINE_SHARE if route.engine else size)
                _measure(whole, api, session, outcome, route)
                yield outcome


def main() -> None:
    """Start a service, ask it, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 18, help="n (default 262144)")
    parser.add_argument("--only", default="", help="routes whose name holds this")
    arguments = parser.parse_args()
    wrong, waited = 0, 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), f"--encoder={SHIPPED / DEFAULT_ENCODER}", model=SHIPPED / DEFAULT_MODEL) as whole,
    ):
        for outcome in examine(whole, arguments.bytes, arguments.only):
            print(outcome, flush=True)
            wrong, waited = wrong + outcome.wrong, max(waited, outcome.waited)
    print(f"{wrong} wrong; /livez took {1000 * waited:.0f} ms at worst")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

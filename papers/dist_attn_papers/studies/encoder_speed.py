"""The encoder that ships against sentence-transformers with the same weights: short sentences, and a million tokens."""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from benchmarks.measured import Found, Panel, Table
from benchmarks.peers import require
from benchmarks.timing import interleaved
from dist_attn.commands.add_model import ADDABLE, fetch
from dist_attn_papers.service.program import own_service
from dist_attn_papers.studies.encoder_arms import arms_table

__all__ = ["NAME", "QUESTION", "TESTS", "measure"]

NAME = "encoder-speed"
QUESTION = (
    "How fast does the service encode with `minilm-stream`, against sentence-transformers with MiniLM's own weights "
    "and as many threads? One short sentence, 64 at once, and a million tokens as one stream; and the model alone, "
    "against torch, OpenVINO and ONNX Runtime, each in its fastest precision."
)
TESTS = ("tests/models/test_stream_encoder.py", "tests/commands/test_add_model.py")
PEER = "sentence-transformers"
OURS, THEIRS = "ours", PEER
SENTENCES, BATCH, ROUNDS, ARM_ROUNDS = 64, 32, 15, 8
TOKENS, WINDOW, WINDOWS = 1_000_000, 254, 192  # sentence-transformers cuts what is longer than 254 word pieces
READ_S = 3600.0
WORDS = ("the", "of", "and", "to", "in", "a", "that", "it", "was", "his", "he", "with", "as", "had", "for", "her")
NOTES = (
    "Ours is the whole service over HTTP: a rank with so many threads, and the API, which makes tokens and rows, "
    "in a process of its own. sentence-transformers runs in the process that measures, "
    f"`encode(..., batch_size={BATCH})`. Words are common ones, each a token; sentences have 4 to 24 of them.",
    f"A million tokens are posted to /v1/encodings, rows of 512, once; of sentence-transformers {WINDOWS} windows of "
    f"{WINDOW} tokens, the longest that it reads whole, are timed before and after, and the faster counts.",
    "One thread: ours reads a stream, with a layer behind MiniLM's; peers read batches. OpenVINO and ONNX Runtime are "
    "left out where they are not installed (`pip install openvino onnxruntime onnx`).",
)


def measure(smoke: bool) -> Found:
    """Sentences in turns, then the stream.

    Raises: ConfigError where sentence-transformers is not installed; StorageError where MiniLM cannot be fetched.
    """
    require(PEER)
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of the rank, which otherwise takes all cores
    tokens, windows, rounds = (5_000, 2, 1) if smoke else (TOKENS, WINDOWS, ROUNDS)
    with TemporaryDirectory() as place:
        folder = fetch(ADDABLE["minilm"], Path(place))
        theirs = _peer(folder)
        arms, rates = arms_table(folder, Path(place), 1 if smoke else ARM_ROUNDS)
    chance = random.Random(0)
    sentences = [_words(chance, chance.randint(4, 24)) for _ in range(SENTENCES)]
    texts = [_words(chance, WINDOW) for _ in range(windows)]
    encode = partial(theirs.encode, batch_size=BATCH, show_progress_bar=False)
    with own_service("minilm-stream", 1) as service, httpx.Client(base_url=service.url, timeout=READ_S) as http:
        works: dict[str, Callable[[], object]] = {
            OURS: partial(_embed, http, sentences),
            THEIRS: partial(encode, sentences),
            f"{OURS}, one": partial(_embed, http, sentences[:1]),
            f"{THEIRS}, one": partial(encode, sentences[:1]),
        }
        times = interleaved(works, rounds)
        before_s = _timed(partial(encode, texts))
        began = time.perf_counter()
        read = _read(http, _words(chance, tokens))
        stream = read / (time.perf_counter() - began)
        windows_s = min(before_s, _timed(partial(encode, texts)))
    rate = windows * WINDOW / windows_s
    one, short = (times[f"{THEIRS}{n}"].median / times[f"{OURS}{n}"].median for n in (", one", ""))
    rows = (
        *(
            (what, *(f"{1e3 * times[f'{who}{n}'].median:,.1f} ms" for who in (OURS, THEIRS)), f"{faster:.2f}x")
            for what, n, faster in (("one short sentence", ", one", one), (f"{SENTENCES} short sentences", "", short))
        ),
        (f"{read:,} tokens", f"{stream:,.0f} tokens/s", f"{rate:,.0f} tokens/s", f"{stream / rate:.2f}x"),
    )
    fastest = max(rate for name, rate in rates.items() if not name.startswith(OURS))
    of_arms = rates.get(f"{OURS}, bfloat16", rates[f"{OURS}, float32"]) / fastest
    ratios = {
        "one thread, fastest peer": round(of_arms, 3),
        "one short sentence": round(one, 3),
        "short sentences": round(short, 3),
        "one stream": round(stream / rate, 3),
    }
    numbers = {f"{who}, {SENTENCES} sentences, seconds": times[who].median for who in (OURS, THEIRS)}
    numbers |= {f"{OURS}, tokens a second": stream, f"{THEIRS}, tokens a second": rate, "tokens": read}
    numbers |= {f"{name}, one thread, tokens a second": rate for name, rate in rates.items()}
    panel = Panel("tokens a second", "tokens", "tokens/s", {OURS: {read: stream}, THEIRS: {windows * WINDOW: rate}})
    table = Table("Encoding", ("work", OURS, THEIRS, "ours are faster by"), rows)
    return Found((table, arms), ratios, numbers, (panel,), NOTES)


def _peer(folder: Path) -> Any:
    """MiniLM as sentence-transformers reads it, from the package that `dist-attn models add minilm` takes."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _embed(http: httpx.Client, sentences: list[str]) -> None:
    answer = http.post("/v1/embeddings", json={"model": "minilm-stream", "input": sentences})
    answer.raise_for_status()


def _read(http: httpx.Client, text: str) -> int:
    """Tokens of a text of which all rows came."""
    last, tokens = b"", 0
    headers = {"content-type": "text/plain"}
    with http.stream("POST", "/v1/encodings?window=512", content=text.encode(), headers=headers) as answer:
        answer.raise_for_status()
        for piece in answer.iter_bytes():
            last = (last + piece)[-65_536:]
    for line in last.splitlines()[1:]:
        event = json.loads(line)
        tokens = event.get("stop", tokens)
        if event.get("object") == "error":
            raise RuntimeError(event)
    print(f"{tokens:,} tokens were read", file=sys.stderr, flush=True)
    return int(tokens)

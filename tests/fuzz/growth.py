"""CPU time of everything that reads a client's text, at n and at 2n bytes of texts made to be slow: linear, or refused.

python -m tests.fuzz.growth --bytes 262144
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

import numpy as np
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.base.parsing import parse_json, parse_query
from dist_attn_service.http.exchange import byte_range
from dist_attn_service.schemas.completions import ChatRequest, CompletionRequest
from dist_attn_service.schemas.documents import SearchRequest
from dist_attn_service.search.passages import WordCounts, places_of, words_of
from dist_attn_service.text.choice_text import StopScanner
from dist_attn_service.text.text_check import TextCheck
from dist_attn_service.uploads.multipart import FormParser, boundary_of
from dist_attn_service.uploads.tus import parse_metadata

from dist_attn.errors import InputError
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import IncrementalDecoder, LibraryTokeniser, Tokeniser, load_tokeniser
from dist_attn.text.cuts import CutFinder
from tests.support.tokenisers import downloaded_contents, llama_bpe, sentence_piece_bpe, small_bpe, unigram

__all__ = ["READERS", "TEXTS", "WORST", "growth"]

WORST = 2.5  # of the time at n may be needed at 2n
TRIES = 20  # of what seems steeper, as other work on the machine shows in CPU time too
PIECE = 1 << 16  # bytes that are pushed at once, as the service does

TEXTS = {
    "prose": "The ship sailed at 5 p.m. on 3 May. Mr. Gray said: \u201cNo. 7 is a caf\u00e9.\u201d\n\n",
    "letters": "a",
    "blanks": " ",
    "lines": "\n",
    "carriage returns": "\r\n \t",
    "digits": "1",
    "stops": "Mr. ",
    "numbers": "No. 1 ",
    "marks": "\u0300\u0316",
    "marks on letters": "a" + "\u0316\u0300" * 40,
    "jamo": "\u1100\u1161",
    "tibetan": "\u0f73\u0f71\u0f72\u0f74",
    "joined": "\U0001f468\u200d",
    "ideographs": "\u738b",
    "kana": "\u30cf\u309a",
    "ligatures": "\ufdfa",
    "metaspace": " \u2581",
    "punctuation": "!?\u2026\u201d",
    "tags": "<|im_end|><html ",
    "nul": "\0",
    "quotes": "\"'\\",
    "lists": "[",
    "headings": "Chapter 1\n",
    "semicolons": '; a="\\"',
    "commas": "a ,b=, ",
}
"""What each text repeats."""


def _in_pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + PIECE] for at in range(0, len(data), PIECE))


def _stream(tokeniser: Tokeniser, data: bytes) -> None:
    tail = b""
    for piece in _in_pieces(data):
        tail += piece
        _, _, consumed = tokeniser.encode_with_ends(tail, final=False)
        tail = tail[consumed:]
    tokeniser.encode_with_ends(tail, final=True)


def _decode(data: bytes) -> None:
    decoder, tokeniser = _decoder()
    for token in tokeniser.encode(data).tolist():
        decoder.push(token)
    decoder.finish()


def _decoder() -> tuple[IncrementalDecoder, Tokeniser]:
    tokeniser = small_bpe()
    return IncrementalDecoder(tokeniser, begins=True), tokeniser


def _cuts(kind: str) -> Callable[[bytes], None]:
    def work(data: bytes) -> None:
        finder = CutFinder(kind)
        for piece in _in_pieces(data):
            finder.push(piece)
            finder.mark(np.zeros(len(piece), np.int32), np.ones(len(piece), np.int64))
        finder.push(b"", final=True)

    return work


def _stops(data: bytes) -> None:
    scanner = StopScanner(["aaaaaaaaaaaaaaab", "\n\n\nUser:", "\u0300\u0316\u0300a"])
    text = data.decode()
    for at in range(0, len(text), 4):
        scanner.push(text[at : at + 4])


def _form(data: bytes) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
    for body in (head + data + b"\r\n--b--\r\n", b"--b\r\n" + data):
        parser = FormParser(b"b")
        with suppress(ServiceError):
            for piece in _in_pieces(body):
                parser.push(piece)


def _headers(data: bytes) -> None:
    text = data.decode()
    for read in (boundary_of, parse_metadata, lambda value: byte_range(value, 9)):
        with suppress(ServiceError):
            read("multipart/form-data; boundary=b" + text)
        with suppress(ServiceError):
            read(text)
    with suppress(ServiceError):
        parse_query([("model", text)], CompletionRequest)


def _bodies(data: bytes) -> None:
    text = data.decode()
    for kind, value in (
        (CompletionRequest, {"prompt": text, "stop": text}),
        (ChatRequest, {"messages": [{"role": "user", "content": text}]}),
        (SearchRequest, {"query": text, "documents": [text]}),
    ):
        with suppress(ServiceError):
            parse_json(json.dumps(value).encode(), kind)
        with suppress(ServiceError):
            parse_json(data, kind)


@cache
def _shipped(name: str) -> Tokeniser:
    return load_tokeniser(resolve_model_folder(name))


@cache
def _library(kind: str) -> LibraryTokeniser:
    return LibraryTokeniser(json.loads(downloaded_contents(kind)), None)


READERS: dict[str, Callable[[bytes], object]] = {
    "words": lambda data: words_of(data.decode()),
    "word counts": lambda data: WordCounts.of([[data.decode()]]),
    "places": lambda data: places_of(data.decode(), frozenset({"a", "ship", "\u738b"})),
    **{f"edges of {kind}s": _cuts(kind) for kind in ("sentence", "paragraph", "chapter")},
    "writer-12m": lambda data: _stream(_shipped("writer-12m"), data),
    "minilm-stream": lambda data: _stream(_shipped("minilm-stream"), data),
    "llama 3": lambda data: _stream(llama_bpe(), data),
    "llama 3, whole": lambda data: llama_bpe().encode_whole(data, framed=True),
    "llama 2": lambda data: _stream(sentence_piece_bpe(), data),
    "llama 2, whole": lambda data: sentence_piece_bpe().encode_whole(data, framed=True),
    "unigram": lambda data: _stream(unigram(), data),
    "t5, whole": lambda data: _library("t5").encode(data),
    "parts": lambda data: llama_bpe().encode_parts([data.decode(), "\n", data.decode()]),
    "decoding": _decode,
    "stop strings": _stops,
    "checks of text": lambda data: [*map(TextCheck("text/plain").push, _in_pieces(data))],
    "forms": _form,
    "headers": _headers,
    "bodies": _bodies,
}


def growth(read: Callable[[bytes], object], unit: str, size: int) -> tuple[float, float]:
    """CPU seconds at 2n bytes over those at n, at best, and those at n."""
    texts = [(unit * (n // len(unit.encode()))).encode() for n in (size, 2 * size)]
    best = [float("inf")] * 2
    for _ in range(TRIES):
        for place, text in enumerate(texts):
            begun = time.process_time()
            with suppress(InputError, ServiceError):
                read(text)
            best[place] = min(best[place], time.process_time() - begun)
        if best[1] <= WORST * best[0]:
            break
    return best[1] / best[0], best[0]


def main() -> None:
    """Print each reader with its slowest growth and its slowest text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 18)
    size = parser.parse_args().bytes
    for name, read in READERS.items():
        found = {text: growth(read, unit, size) for text, unit in TEXTS.items()}
        steepest, slowest = (max(found, key=lambda text: found[text][place]) for place in (0, 1))
        print(
            f"{name:22} {found[steepest][0]:5.2f} times ({steepest}), {found[slowest][1] * 1e3:8.1f} ms for {size} "
            f"bytes ({slowest})",
            flush=True,
        )


if __name__ == "__main__":
    main()

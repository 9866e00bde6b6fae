"""What reads a client's text, timed at n and 2n bytes of texts that are hard to read: the time may grow 2.5 times.

    python -m tests.fuzz.growth [--only NAME]

What is timed is the processor's time of this thread, so that others' work hardly counts. `tests.fuzz.route_growth`
does so with the routes of a service that runs.
"""

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of the library have times of their own

from dist_attn_service.base.errors import ServiceError
from dist_attn_service.base.parsing import parse_json
from dist_attn_service.schemas.completions import ChatRequest, CompletionRequest
from dist_attn_service.schemas.documents import SearchRequest
from dist_attn_service.sessions.answers import expected_digest, names_tag
from dist_attn_service.text.choice_text import StopScanner
from dist_attn_service.uploads.multipart import FormParser, boundary_of
from dist_attn_service.uploads.tus import parse_metadata
from pydantic import BaseModel
from starlette.datastructures import Headers

from dist_attn.shipped import DEFAULT_ENCODER, SHIPPED
from dist_attn.text import ForeignTokeniser, IncrementalDecoder, LibraryTokeniser, Tokeniser, load_tokeniser
from dist_attn.text.cuts import CutFinder
from dist_attn.text.ranking import WordCounts, bm25, places_of, words_of
from dist_attn_client.plan import EventDecoder
from tests.support.tokenisers import (
    downloaded_contents,
    foreign_bpe,
    llama_bpe,
    sentence_piece_bpe,
    small_bpe,
    unigram,
)

__all__ = ["MOST_GROWTH", "PARTS", "UNITS", "findings", "text_of"]

MOST_GROWTH = 2.5
SMALLEST, LEAST_SECONDS, TRIES = 1 << 12, 0.004, 8
PIECE_BYTES = 1 << 16
BOUNDARY = b"b" * 60

UNITS: Mapping[str, str] = {
    "prose": 'It was Mr. X, e.g. "A"! He came at 5 p.m. and left.\n',
    "letters": "a",
    "words": "a ",
    "digits": "1",
    "blanks": " ",
    "lines": "\n",
    "empty lines": "x" + " " * 64 + "\r\n" + "\t" * 64 + "\n",
    "stops and blanks": ".\")]'" + " " * 199,
    "stops": ".",
    "headings": "CHAPTER \n",
    "punctuation": "!?",
    "brackets": "[{",
    "quotes": '"',
    "backslashes": "\\",
    "zeros": "\0",
    "marks": "\u0316\u0300",
    "short runs of marks": "a" + "\u0316\u0300" * 14,
    "marks in two parts": "\u0344\u0f73\u0f75\u0f72\u0f74",
    "jamo": "\u1100\u1161\u11a8",
    "leading jamo": "\u1100",
    "kana": "\u304b\u3099",
    "han": "\u738b",
    "families": "\U0001f468\u200d",
    "folded": "\ufb01\u00df\u0130",
    "blank of a file": "\u2581",
    "byte tokens": "<0x41>",
    "special tokens": "<|endoftext|><s><tool>",
    "their beginnings": "<|endoftext",
}
LISTS: Mapping[str, str] = {
    "numbers": "1,",
    "long numbers": "9" * 4000 + ",",
    "texts": '"",',
    "lists": "[1],",
    "objects": '{"a":1},',
    "open lists": "[",
}


def text_of(unit: str, size: int) -> str:
    """So many bytes of the unit, again and again, and no half character."""
    return (unit * (size // len(unit.encode()) + 1)).encode()[:size].decode(errors="ignore")


# ---- what is timed -------------------------------------------------------------------------------


def _pieces(text: str) -> Iterator[bytes]:
    data = text.encode()
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


def _cuts(kind: str, text: str) -> None:
    finder = CutFinder(kind)
    for piece in _pieces(text):
        finder.push(piece)
    finder.push(b"", final=True)


def _stream(tokeniser: Tokeniser, text: str) -> None:
    rest = b""
    for piece in _pieces(text):
        data = rest + piece
        _, _, consumed = tokeniser.encode_with_ends(data, final=False)
        rest = data[consumed:]
    tokeniser.encode_with_ends(rest, final=True)


def _whole(tokeniser: Tokeniser, text: str) -> None:
    tokeniser.encode_whole(text.encode(), framed=True)


def _parts(tokeniser: Tokeniser, text: str) -> None:
    tokeniser.encode_parts([text, *list(tokeniser.special_tokens.values())[:1], "a"])


def _decoded(tokeniser: Tokeniser, text: str) -> None:
    decoder = IncrementalDecoder(tokeniser, begins=True)
    for token in tokeniser.encode(text.encode()).tolist():
        decoder.push(token)
    decoder.finish()


def _stops(text: str) -> None:
    scanner = StopScanner([text[:255] + "\u0001", text[:20] + "\u0002"])
    for at in range(0, len(text), 7):
        scanner.push(text[at : at + 7])
    scanner.finish()


def _search(text: str) -> None:
    counts = [WordCounts.of([[text]], first) for first in range(2)]
    bm25("a b c", counts, 2)
    bm25(text, [WordCounts.of([["a b c"]], first) for first in range(16)], 16)


def _form(text: str) -> None:
    head = b"--%b\r\nContent-Disposition: form-data; name=a\r\n\r\n" % BOUNDARY
    parser = FormParser(BOUNDARY)
    for piece in (head, *_pieces(text)):
        parser.push(piece)


def _head_of_field(text: str) -> None:
    for value in (b"%b\x01", b'form-data; name="%b', b"form-data; %b"):
        with suppress(ServiceError):
            line = b"Content-Disposition: " + value % text.encode()
            FormParser(BOUNDARY).push(b"--%b\r\n%b\r\n\r\n" % (BOUNDARY, line))


def _events(text: str) -> None:
    decoder, data = EventDecoder(), b"data: " + text.encode()
    for at in range(0, len(data), 256):
        list(decoder.push(data[at : at + 256]))


def _headers(value: str) -> None:
    value = value.encode().decode("latin-1")
    names_tag(value, '"a"')
    names_tag(f'"{value}"', '"a"')
    expected_digest(Headers({"content-digest": f"sha-256=:{value}"}))
    for read, given in ((parse_metadata, value), (boundary_of, value), (boundary_of, f";boundary={value}")):
        with suppress(ServiceError):
            read(given)


def _json(kind: type[BaseModel], around: str, text: str) -> None:
    with suppress(ServiceError):
        parse_json(around.replace("HERE", text).encode(), kind)


def _json_text(text: str) -> None:
    _json(SearchRequest, '{"query": "a", "documents": ["HERE"]}', json.dumps(text)[1:-1])


def _of_tokeniser(make: Callable[[], Tokeniser], text: str) -> None:
    tokeniser = make()
    _stream(tokeniser, text)
    if isinstance(tokeniser, ForeignTokeniser):
        _whole(tokeniser, text)
        _parts(tokeniser, text)


@cache
def _word_pieces() -> Tokeniser:
    return load_tokeniser(SHIPPED / DEFAULT_ENCODER)


@cache
def _library(kind: str) -> Tokeniser:
    return LibraryTokeniser(json.loads(downloaded_contents(kind)), None)


class Part(NamedTuple):
    """Something that reads a text, the texts, and the bytes of the longest that is read twice as long."""

    read: Callable[[str], object]
    units: Mapping[str, str] = UNITS
    longest: int = 1 << 18


PARTS: Mapping[str, Part] = {
    "words": Part(words_of),
    "places": Part(lambda text: places_of("a" + text, frozenset(["zz"]))),
    "ranks by words": Part(_search),
    **{f"cuts of {kind}s": Part(partial(_cuts, kind)) for kind in ("sentence", "paragraph", "chapter")},
    "stop strings": Part(_stops),
    "a form": Part(_form),
    "the head of a field": Part(_head_of_field, longest=2048),
    "headers": Part(_headers, longest=1 << 15),
    "events": Part(_events),
    "JSON of a text": Part(_json_text),
    "JSON as it comes": Part(partial(_json, SearchRequest, "HERE")),
    "JSON of a list": Part(partial(_json, CompletionRequest, '{"prompt": [HERE1]}'), LISTS),
    "JSON of a chat": Part(partial(_json, ChatRequest, '{"messages": [HERE1]}'), LISTS),
    "tokens of SentencePiece as text": Part(partial(_decoded, sentence_piece_bpe()), longest=1 << 16),
    **{
        f"tokens of {name}": Part(partial(_of_tokeniser, make), longest=1 << 17)
        for name, make in (
            ("our BPE", small_bpe),
            ("byte-level BPE", foreign_bpe),
            ("byte-level BPE of Llama 3", llama_bpe),
            ("SentencePiece", sentence_piece_bpe),
            ("Unigram", unigram),
            ("word pieces", _word_pieces),
            ("Unigram as a whole", partial(_library, "t5")),
            ("BPE as a whole", partial(_library, "gemma")),
        )
    },
}


# ---- growth --------------------------------------------------------------------------------------


def _seconds(read: Callable[[str], object], text: str) -> float:
    gc.collect(0)
    gc.disable()  # what it finds is of others
    began = time.thread_time()
    try:
        read(text)
        return time.thread_time() - began
    finally:
        gc.enable()


def growth(part: Part, unit: str) -> tuple[float, int, float]:
    """How many times as long twice the text takes, at most bytes; 0 where all of it takes no time worth the name.

    Timed again, later each time, while the growth is too large: the shortest of several times is the least disturbed.
    Where a core is slower for a while, what is timed side by side says more: then the median of the pairs counts.
    """
    size = min(SMALLEST, part.longest)
    while (once := _seconds(part.read, text_of(unit, size))) < LEAST_SECONDS and size < part.longest:
        size *= 2
    if once < LEAST_SECONDS:
        return 0.0, size, once
    once, twice, pairs = math.inf, math.inf, []
    for tried in range(TRIES):
        time.sleep(0.2 * tried)
        pair = [_seconds(part.read, text_of(unit, length)) for length in (size, 2 * size)]
        once, twice = min(once, pair[0]), min(twice, pair[1])
        pairs.append(pair[1] / pair[0])
        if twice <= MOST_GROWTH * once:
            return twice / once, size, once
    return statistics.median(pairs), size, once


def findings(part: Part) -> list[str]:
    """The texts whose time grows too much, in words."""
    found = []
    for name, unit in part.units.items():
        times, size, seconds = growth(part, unit)
        if times > MOST_GROWTH:
            found.append(f"{name}: {times:.1f} times as long for twice {size} bytes, which take {seconds:.3f} s")
    return found


def main() -> None:
    """Print what grows too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts whose name holds this")
    for name, part in PARTS.items():
        if parser.parse_args().only in name:
            print(f"{name:32}", "; ".join(findings(part)) or "linear", flush=True)


if __name__ == "__main__":
    main()

"""Documents as MiniLM reads them: hidden states of their tokens, which chapter each token is of, and some sentences.

The hidden states do not change while the layer behind them is trained, so they are computed once and kept in half
precision. Letters: L tokens, D width, S sentences, M tokens of all sentences.
"""

import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dist_attn.models import StreamEncoder
from dist_attn.text import Tokeniser
from dist_attn_research.retrieval.packages import unpacked
from dist_attn_research.retrieval.texts import brown_documents, novels, speeches
from dist_attn_research.writer.texts import page_paragraphs

__all__ = ["ReadDocument", "read_documents", "texts"]

_HEADING = re.compile(r"^[ \t]*(?:CHAPTER|Chapter)[ \t]+(?:\d+|[A-Z])[^\n]*(?:\n|\Z)", re.MULTILINE)
SHORTEST_CHARACTERS, CHAPTERS_CHARACTERS, MOST_CHARACTERS = 3_000, 100_000, 40_000
FEWEST_TOKENS, MOST_TOKENS = 1_100, 30_000
BROWN_TOGETHER = 5  # documents of 2,000 words that follow each other
SENTENCE_TOKENS, TOKENS_A_SENTENCE = (10, 48), 100

Parts = list[tuple[str, int]]
Halves = NDArray[np.float16]


def texts(books: Path) -> list[Parts]:
    """Documents of parts, each with the number of its chapter, speech, sample or page, in a drawn order."""
    found, number = list[Parts](), 0

    def add(parts: list[str]) -> None:
        nonlocal number
        found.append([(part, number + place) for place, part in enumerate(parts)])
        number += len(parts)

    for _, text in novels(books, held_out=False):
        for run in _runs(text):
            add(run)
    for _, text in speeches(held_out=False):
        add([text[:MOST_CHARACTERS]])
    samples = [text for _, text in brown_documents(held_out=False)]
    for start in range(0, len(samples), BROWN_TOGETHER):
        add(samples[start : start + BROWN_TOGETHER])
    for folder in (unpacked("anarchism"), unpacked("handbook") / "usr/share/doc/debian-handbook/html/en-US"):
        for paragraphs in page_paragraphs(folder):
            text = "\n\n".join(paragraphs)
            if len(text) > SHORTEST_CHARACTERS:
                add([text[:MOST_CHARACTERS]])
    random.Random(0).shuffle(found)
    return found


def _runs(novel: str) -> Iterator[list[str]]:
    """Chapters that follow each other."""
    headings = list(_HEADING.finditer(novel))
    ends = [heading.start() for heading in headings[1:]] + [len(novel)]
    run = list[str]()
    for heading, end in zip(headings, ends, strict=True):
        chapter = novel[heading.end() : end]
        if len(chapter) > SHORTEST_CHARACTERS:
            run.append(chapter)
        if sum(map(len, run)) > CHAPTERS_CHARACTERS:
            yield run
            run = []
    if run:
        yield run


@dataclass(frozen=True)
class ReadDocument:
    """Shapes: hidden [L, D], label [L]; spans [S, 2], and what MiniLM makes of these sentences alone, [M, D]."""

    hidden_LD: Halves
    label_L: NDArray[np.int64]
    span_S2: NDArray[np.int64]
    alone_MD: Halves

    def sentence(self, number: int) -> Halves:
        """The hidden states of a sentence that was read alone."""
        sizes_S = self.span_S2[:, 1] - self.span_S2[:, 0]
        start = int(sizes_S[:number].sum())
        return self.alone_MD[start : start + int(sizes_S[number])]


def read_documents(
    model: StreamEncoder, tokeniser: Tokeniser, books: Path, most_tokens: int, cache: Path, tell: Callable[[str], None]
) -> list[ReadDocument]:
    """The first documents, of so many tokens together; those that `cache` has are taken from there."""
    cache.mkdir(parents=True, exist_ok=True)
    read, total, began = list[ReadDocument](), 0, time.monotonic()
    for number, parts in enumerate(texts(books)):
        path = cache / f"{number:04d}.npz"
        if not path.is_file():
            part = path.with_suffix(".part.npz")
            np.savez(part, **vars(_read(model, tokeniser, parts, random.Random(number))))
            part.replace(path)
        stored = np.load(path)
        document = ReadDocument(*(stored[field.name] for field in fields(ReadDocument)))
        if len(document.label_L) >= FEWEST_TOKENS:
            read.append(document)
            total += len(document.label_L)
        if total >= most_tokens:
            break
        if number % 20 == 0:
            tell(f"{total} tokens of {len(read)} documents read, {time.monotonic() - began:.0f} s")
    return read


@torch.inference_mode()
def _read(model: StreamEncoder, tokeniser: Tokeniser, parts: Parts, draw: random.Random) -> ReadDocument:
    tokens = [tokeniser.encode(text.encode()).astype(np.int64) for text, _ in parts]
    tokens_L = np.concatenate(tokens)[:MOST_TOKENS]
    label_L = np.repeat([label for _, label in parts], [len(one) for one in tokens])[:MOST_TOKENS]
    ends = {int(tokeniser.encode(f"a{mark}".encode())[-1]) for mark in ".?!"}
    behind = [0, *(place + 1 for place, token in enumerate(tokens_L.tolist()) if token in ends)]
    low, high = SENTENCE_TOKENS
    spans = [(start, stop) for start, stop in itertools.pairwise(behind) if low <= stop - start <= high]
    chosen = sorted(draw.sample(spans, min(len(spans), len(tokens_L) // TOKENS_A_SENTENCE)))
    with torch.autocast("cpu", torch.bfloat16):
        hidden_LD = model.blocks_hidden(torch.from_numpy(tokens_L)[None])[0]
        alone = [model.blocks_hidden(torch.from_numpy(tokens_L[start:stop])[None])[0] for start, stop in chosen]
    width = model.hidden_size
    return ReadDocument(
        hidden_LD.half().numpy(),
        label_L,
        np.array(chosen, dtype=np.int64).reshape(-1, 2),
        torch.cat([*alone, torch.empty(0, width)]).half().numpy(),
    )

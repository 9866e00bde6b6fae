"""What is looked for in which texts; each case is made of texts that no encoder was trained on here."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser
from dist_attn_papers.retrieval.questions import QUESTIONS
from dist_attn_papers.retrieval.texts import brown_documents, glosses, speeches, verses
from dist_attn_papers.studies.chapter_retrieval import BOOKS, MOST_TOKENS, WINDOW, read_books

__all__ = ["CASES", "Case"]

CUT_BY = "books-6m"  # whose tokens windows are of, whatever reads them


@dataclass(frozen=True)
class Case:
    """Queries, candidates, and which of these are right; a candidate is none where `out` says so.

    `group` says which queries are drawn together for intervals, and `streams` which candidates follow each other in one
    text. A query without a right candidate is not asked. Shapes: right and out [Q, N], group [Q].
    """

    queries: tuple[str, ...]
    candidates: tuple[str, ...]
    right_QN: NDArray[np.bool_]
    out_QN: NDArray[np.bool_]
    group_Q: NDArray[np.int64]
    most: int = 1
    streams: tuple[slice, ...] = ()


def _neighbours(
    texts: Sequence[str], labels: Sequence[object], groups: Sequence[object], streams: tuple[slice, ...] = ()
) -> Case:
    """Every text looks for the others: itself alone is no candidate."""
    label_N, group_N = (np.unique([str(one) for one in each], return_inverse=True)[1] for each in (labels, groups))
    out_QN = np.eye(len(texts), dtype=np.bool_)
    return Case(tuple(texts), tuple(texts), (label_N[:, None] == label_N) & ~out_QN, out_QN, group_N, streams=streams)


def _pairs(queries: Sequence[str], candidates: Sequence[str]) -> Case:
    """The candidate of the same number is right, and so are those with the same text."""
    label_N = np.unique(candidates, return_inverse=True)[1]
    out_QN = np.zeros((len(queries), len(candidates)), dtype=np.bool_)
    right_QN = label_N[:, None] == label_N
    return Case(tuple(queries), tuple(candidates), right_QN, out_QN, np.arange(len(queries)), most=10)


def _windows(text: str) -> list[str]:
    """Whole windows of as many tokens as those of chapter-retrieval."""
    tokeniser = load_tokeniser(resolve_model_folder(CUT_BY))
    tokens = tokeniser.encode(text.encode())
    pieces = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    return [tokeniser.decode(piece).decode("utf-8", "replace") for piece in pieces]


def chapters(books: Path, most: int) -> Case:
    """The windows of the study chapter-retrieval."""
    tokeniser = load_tokeniser(resolve_model_folder(CUT_BY))
    texts, labels, streams = list[str](), list[str](), list[slice]()
    for book in read_books(books, BOOKS, tokeniser, min(MOST_TOKENS, most * WINDOW)):
        first = len(texts)
        texts += [tokeniser.decode(w).decode("utf-8", "replace") for w in book.tokens.reshape(-1, WINDOW)]
        # A window of no single chapter is read in its stream, and is neither looked for nor found.
        labels += [f"{book.name} {c}" if c >= 0 else "" for c in book.chapter_W]
        streams.append(slice(first, len(texts)))
    case = _neighbours(texts, labels, labels, tuple(streams))
    none_N = np.array([not label for label in labels])
    none_NN = none_N | none_N[:, None]
    return replace(case, right_QN=case.right_QN & ~none_NN, out_QN=case.out_QN | none_N)


def chapters_apart(books: Path, most: int) -> Case:
    """`chapters`, and the windows before and behind the one that looks are no candidates."""
    case = chapters(books, most)
    number_N = np.arange(len(case.candidates))
    beside_NN = np.abs(number_N[:, None] - number_N) == 1
    return replace(case, right_QN=case.right_QN & ~beside_NN, out_QN=case.out_QN | beside_NN)


def _speeches(label: Callable[[str], str]) -> Callable[[Path, int], Case]:
    def case(_: Path, most: int) -> Case:
        texts, names, streams = list[str](), list[str](), list[slice]()
        for name, text in speeches(held_out=True):
            windows = _windows(text)[:6]
            if len(windows) < 2 or len(texts) >= most:
                continue
            streams.append(slice(len(texts), len(texts) + len(windows)))
            texts, names = texts + windows, names + [name] * len(windows)
        return _neighbours(texts, [label(name) for name in names], names, tuple(streams))

    return case


def genres(_: Path, most: int) -> Case:
    """The first window of each document of the Brown corpus; right is one of the same genre."""
    found = [(genre, windows[0]) for genre, text in brown_documents(held_out=True) if (windows := _windows(text))]
    found = found[:: max(1, len(found) // most)]
    return _neighbours([text for _, text in found], [genre for genre, _ in found], range(len(found)))


def _drawn(pairs: Sequence[tuple[str, str]], most: int) -> Case:
    chosen = np.random.default_rng(0).permutation(len(pairs))[:most]
    return _pairs([pairs[n][0] for n in chosen], [pairs[n][1] for n in chosen])


def definitions(_: Path, most: int) -> Case:
    """A definition of WordNet looks for its first word among those of others."""
    return _drawn([(gloss, words[0]) for words, gloss in glosses(held_out=True)], most)


def translations(_: Path, most: int) -> Case:
    """A verse of the King James Bible looks for the same one in the World English Bible."""
    return _drawn(list(verses()), most)


def questions(books: Path, most: int) -> Case:
    """Questions of a reader look for passages of the two novels, the book of the question alone."""
    asked, passages, streams, books_of = list[str](), list[str](), list[slice](), list[int]()
    patterns = list[str]()
    for name, of_book in QUESTIONS.items():
        windows = _windows((books / f"{name}.txt").read_text("utf-8"))
        streams.append(slice(len(passages), len(passages) + len(windows)))
        passages += windows
        for question, pattern in of_book[: max(1, most)]:
            asked.append(question)
            patterns.append(pattern)
            books_of.append(len(streams) - 1)
    out_QN = np.ones((len(asked), len(passages)), dtype=np.bool_)
    for number, book in enumerate(books_of):
        out_QN[number, streams[book]] = False
    found = [
        [re.search(pattern, text, re.IGNORECASE | re.DOTALL) is not None for text in passages] for pattern in patterns
    ]
    right_QN = np.array(found, dtype=np.bool_) & ~out_QN
    return Case(tuple(asked), tuple(passages), right_QN, out_QN, np.arange(len(asked)), most=3, streams=tuple(streams))


CASES: dict[str, tuple[str, Callable[[Path, int], Case]]] = {
    "chapters": ("nearest other window is of the same chapter", chapters),
    "chapters-apart": ("nearest window that is no neighbour is of the same chapter", chapters_apart),
    "speeches": ("nearest other window is of the same speech", _speeches(lambda name: name)),
    "presidents": ("nearest other window is of the same president", _speeches(lambda name: name[5:])),
    "genres": ("nearest other document is of the same genre", genres),
    "definitions": ("the word is among the ten nearest to its definition", definitions),
    "questions": ("a passage that answers is among the first three", questions),
    "verses": ("the verse is among the ten nearest in the other Bible", translations),
}

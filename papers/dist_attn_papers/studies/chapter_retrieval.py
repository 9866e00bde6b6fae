"""Are windows of the same chapter nearer to each other than windows of other books, in the rows that `encode` gives?

The rows of 512 tokens of held-out books stand in one pool. For every window the nearest other one by cosine is looked
up: is it of the same book, of the same chapter? And of all pairs of a window of the same chapter and one of another
book, in how many is the former the nearer? Beside the models stands what counting words does.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.setting import ROOT, Setting, look_around
from dist_attn.checkpoints import load_model_and_tokeniser, resolve_model_folder
from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser
from dist_attn.training.chapters import chapters_of_windows, find_chapters, nearest_rows, window_rows

__all__ = ["TESTS", "Book", "ChapterRetrieval", "Scores", "measure", "rank_rows", "read_books"]

NAME = "chapter-retrieval"
QUESTION = "How well do a document's vectors find its chapters?"
TESTS = ("tests/training/test_chapters.py", "tests/models/test_language_model.py")
FOLDER = Path("data/books")
# Kept out of contrastive training; War and Peace out of all training.
BOOKS = ("war_and_peace.txt", "moby_dick.txt", "jane_eyre.txt")
MODELS = ("books-6m",)
WINDOW, MOST_TOKENS, SMOKE_TOKENS = 512, 61_440, 16_384
STREAMED, ALONE = "one stream", "windows alone"

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Book:
    """The first tokens of a book in whole windows, and the chapter that each window lies in; -1: in no single one."""

    name: str
    tokens: NDArray[np.int32]
    chapter_W: NDArray[np.int64]


@dataclass(frozen=True)
class Scores:
    """Of one book or the mean over books: shares of windows, and of pairs, in 0 to 1."""

    same_book: float
    same_chapter: float
    pairs_in_order: float


@dataclass(frozen=True)
class Line:
    """One way to make rows. `reading` is how windows were read, `centred` whether the mean row was taken off."""

    rows: str
    reading: str
    centred: bool
    mean: Scores
    books: dict[str, Scores]


@dataclass(frozen=True)
class ChapterRetrieval:
    """All ways to make rows, compared."""

    setting: Setting
    windows: dict[str, int]
    chapters: dict[str, int]
    chance: Scores
    lines: tuple[Line, ...]
    case: str = NAME

    def as_json(self) -> str:
        """The result for machines."""
        values = {"object": "benchmark", "window": WINDOW, **asdict(self)}
        return json.dumps(values, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        counts = ", ".join(f"{book} {n} of {self.chapters[book]} chapters" for book, n in self.windows.items())
        lines = [
            "# chapter-retrieval",
            "",
            f"Windows of {WINDOW} tokens in one pool ({counts}), each inside one chapter that has at least two. "
            "Share of windows whose nearest other window (cosine) is of the same book, and of the same chapter; share "
            "of the pairs (same chapter, other book) in which the former is nearer. Means over the books. "
            "Centred: the mean row is taken off.",
            "",
            self.setting.sentence(),
            "",
            "| rows | read as | centred | same book | same chapter | pairs in order | same chapter, by book |",
            "|---|---|---|---|---|---|---|",
        ]
        for line in self.lines:
            books = ", ".join(f"{scores.same_chapter:.1%}" for scores in line.books.values())
            cells = [line.rows, line.reading, "yes" if line.centred else "no", *_percent(line.mean), books]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append(f"| {' | '.join(['chance', '', '', *_percent(self.chance), ''])} |")
        return "\n".join(lines) + "\n"

    def draw(self, path: Path) -> None:
        """Bars of the share of windows whose nearest is of the same chapter, by book."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.5, 1.0 + 0.62 * len(self.lines)), layout="constrained")
        axes = figure.add_subplot()
        names = list(self.windows)
        for number, book in enumerate(names):
            places = [i + 0.26 * (number - (len(names) - 1) / 2) for i in range(len(self.lines))]
            axes.barh(places, [line.books[book].same_chapter for line in self.lines], height=0.24, label=book)
        labels = [f"{n.rows}, {n.reading}{', centred' if n.centred else ''}" for n in self.lines]
        axes.set_yticks(range(len(self.lines)), labels)
        axes.invert_yaxis()
        axes.axvline(self.chance.same_chapter, color="black", linewidth=0.8, linestyle="--", label="chance")
        axes.set(xlabel="share of windows whose nearest other window is of the same chapter", xlim=(0, 1))
        axes.grid(True, axis="x", alpha=0.3)
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=110)


def _percent(scores: Scores) -> list[str]:
    return [f"{value:.1%}" for value in (scores.same_book, scores.same_chapter, scores.pairs_in_order)]


def measure(smoke: bool) -> ChapterRetrieval:
    """Rows of every model and of word counts over the held-out books; `smoke` reads little of each."""
    setting = look_around()
    return compare(MODELS, SMOKE_TOKENS if smoke else MOST_TOKENS, setting)


def compare(models: Sequence[str], most_tokens: int, setting: Setting) -> ChapterRetrieval:
    """The same for the models of any folders or shipped names that have one tokeniser."""
    loaded = {resolve_model_folder(name).name: load_model_and_tokeniser(name) for name in models}
    tokeniser = next(iter(loaded.values()))[1]
    books = read_books(ROOT / FOLDER, BOOKS, tokeniser, most_tokens)
    lines = [_line("word counts (tf-idf)", ALONE, False, _count_rows(books, tokeniser.vocab_size), books)]
    for name, (model, _) in loaded.items():
        for reading in (STREAMED, ALONE):
            rows = [window_rows(model, book.tokens, WINDOW, carried=reading == STREAMED) for book in books]
            lines += [_line(name, reading, centred, rows, books) for centred in (False, True)]
    return ChapterRetrieval(
        setting=setting,
        windows={book.name: int((book.chapter_W >= 0).sum()) for book in books},
        chapters={book.name: len(set(book.chapter_W[book.chapter_W >= 0].tolist())) for book in books},
        chance=_mean(_chance(books)),
        lines=tuple(lines),
    )


def read_books(folder: Path, names: Sequence[str], tokeniser: Tokeniser, most_tokens: int) -> list[Book]:
    """The first windows of the books with their chapters; only chapters with two whole windows count.

    Raises: ConfigError for a book that is not there.
    """
    books = []
    for name in names:
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"{folder / name} cannot be read: {error.strerror}; the study needs the book") from None
        tokens = tokeniser.encode(data)
        chapters = find_chapters(data, tokens, tokeniser, 2 * WINDOW)
        count = min(len(tokens), most_tokens) // WINDOW
        chapter_W = chapters_of_windows(chapters, count, WINDOW)
        books.append(Book(name, tokens[: count * WINDOW], chapter_W))
    return books


def _count_rows(books: Sequence[Book], vocab_size: int) -> list[Rows]:
    """Logarithmic counts of each token in a window, times the logarithm of how rare windows with it are."""
    counts = [
        np.stack([np.bincount(window, minlength=vocab_size) for window in book.tokens.reshape(-1, WINDOW)])
        for book in books
    ]
    windows = np.concatenate(counts)
    rarity_V = np.log((1 + len(windows)) / (1 + (windows > 0).sum(0)))
    return [(np.log1p(count) * rarity_V).astype(np.float32) for count in counts]


def rank_rows(rows: Sequence[Rows], books: Sequence[Book], *, centred: bool) -> dict[str, Scores]:
    """The scores of every book, its windows looked for among those of all books.

    Shapes: rows, one [W, D] per book.
    """
    inside = [book.chapter_W >= 0 for book in books]
    rows_ND = np.concatenate([r[i] for r, i in zip(rows, inside, strict=True)]).astype(np.float64)
    book_N = np.concatenate([np.full(int(i.sum()), number) for number, i in enumerate(inside)])
    chapter_N = np.concatenate([book.chapter_W[i] for book, i in zip(books, inside, strict=True)])
    if centred:
        rows_ND -= rows_ND.mean(0)
    nearest_N, cosine_NN = nearest_rows(rows_ND)
    near_book_N = book_N[nearest_N] == book_N
    near_chapter_N = near_book_N & (chapter_N[nearest_N] == chapter_N)
    found = {}
    for number, book in enumerate(books):
        mine = np.flatnonzero(book_N == number)
        others = book_N != number
        orders = []
        for n in mine:
            same = (book_N == number) & (chapter_N == chapter_N[n])
            same[n] = False
            orders.append(_share_in_order(cosine_NN[n, same], cosine_NN[n, others]))
        found[book.name] = Scores(
            float(near_book_N[mine].mean()), float(near_chapter_N[mine].mean()), float(np.mean(orders))
        )
    return found


def _share_in_order(same: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The share of pairs whose first is the larger; equal ones count half."""
    other = np.sort(other)
    below = np.searchsorted(other, same, side="left") + np.searchsorted(other, same, side="right")
    return float(below.mean()) / (2 * max(1, len(other)))


def _chance(books: Sequence[Book]) -> dict[str, Scores]:
    """What a nearest window drawn at random would score."""
    total = sum(int((book.chapter_W >= 0).sum()) for book in books)
    found = {}
    for book in books:
        inside = book.chapter_W[book.chapter_W >= 0]
        _, number_W, count_C = np.unique(inside, return_inverse=True, return_counts=True)
        same = float((count_C[number_W] - 1).mean()) / (total - 1)
        found[book.name] = Scores((len(inside) - 1) / (total - 1), same, 0.5)
    return found


def _line(name: str, reading: str, centred: bool, rows: Sequence[Rows], books: Sequence[Book]) -> Line:
    scores = rank_rows(rows, books, centred=centred)
    return Line(name, reading, centred, _mean(scores), scores)


def _mean(scores: Mapping[str, Scores]) -> Scores:
    values = np.array([(s.same_book, s.same_chapter, s.pairs_in_order) for s in scores.values()])
    return Scores(*(float(mean) for mean in values.mean(0)))

"""Chapters of books: finding them, training on windows drawn from one chapter, and the nearness of such windows.

A row of a batch is a set of chapters that are told apart from each other, so its loss depends on no other row.

Letters: T tokens of a text, W its windows, N rows that are compared, L tokens of a window, B windows read at once,
D model width.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.models import CausalModel, LanguageModel
from dist_attn.ops.device import send
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.text.cuts import CHAPTER_HEADING
from dist_attn.training.config import ContrastConfig, TrainingConfig
from dist_attn.training.datasets.config import TextDataConfig
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.evaluation import score_tokens, token_loss
from dist_attn.training.language_task import LanguageTask, digests_of, read_validation_text, tokenise_files
from dist_attn.training.mesh import Share
from dist_attn.training.task import Criterion, ModelTask, Task

_HEADING = re.compile(CHAPTER_HEADING + rb"[^\n]*(?:\n|\Z)", re.MULTILINE)

LONGEST_CHAPTER = 32_768
"""The most tokens of a chapter. Longer ones are books whose headings look otherwise."""


@dataclass(frozen=True)
class Chapter:
    """The tokens `start` to `stop` (exclusive) of a text."""

    start: int
    stop: int


def find_chapters(data: bytes, tokens: NDArray[np.int32], tokeniser: Tokeniser, shortest: int) -> tuple[Chapter, ...]:
    """Find the chapters of `data`, whose tokens are `tokens`, from behind one heading to before the next.

    Headings are lines that begin with "Chapter" or "CHAPTER" and a number or a capital; they belong to no chapter, nor
    does what comes before the first. Chapters of fewer than `shortest` tokens are left out, and with them the lines
    of a table of contents; so are those of more than `LONGEST_CHAPTER`.
    """
    headings = list(_HEADING.finditer(data))
    # The token at which each byte position is reached: one that straddles an edge belongs to neither side.
    ends_T = np.cumsum(tokeniser.byte_lengths(tokens))
    chapters = []
    stops = [*(heading.start() for heading in headings[1:]), len(data)]
    for heading, stop_byte in zip(headings, stops, strict=False):
        starts_T = np.searchsorted(ends_T, heading.end(), side="left") + 1
        stop = int(np.searchsorted(ends_T, stop_byte, side="right"))
        start = min(int(starts_T), stop)
        if shortest <= stop - start <= LONGEST_CHAPTER:
            chapters.append(Chapter(start, stop))
    return tuple(chapters)


_BLOCK_TOKENS = 4096


@torch.inference_mode()
def window_rows(model: CausalModel, tokens: NDArray[np.int32], window: int, *, carried: bool) -> NDArray[np.float32]:
    """Compute each window's mean hidden state, of one stream as `dist-attn encode` gives it, or of windows read alone.

    Shapes: tokens [T] -> [T // window, D]; what follows the last whole window is left out.
    """
    count = len(tokens) // window
    windows_WL = torch.from_numpy(tokens[: count * window].astype(np.int64)).reshape(count, window)
    parts, state = [torch.empty(0, model.hidden_size, device="cpu")], model.initial_state(1)
    for block_BL in windows_WL.split(max(1, _BLOCK_TOKENS // window)):
        if carried:
            h_BLD, state = model.hidden(block_BL.reshape(1, -1), state=state)
        else:
            h_BLD = model.encode(block_BL)
        parts.append(h_BLD.reshape(-1, window, h_BLD.shape[-1]).mean(1).cpu().float())
    rows: NDArray[np.float32] = torch.cat(parts).numpy()
    return rows


def chapters_of_windows(chapters: tuple[Chapter, ...], count: int, window: int) -> NDArray[np.int64]:
    """Find for each of `count` windows the number of the chapter in which it lies with all its tokens.

    -1 where it lies in no single one, or where its chapter has no second window to be found.
    """
    chapter_W = np.full(count, -1, dtype=np.int64)
    for number, chapter in enumerate(chapters):
        first, last = -(-chapter.start // window), min(chapter.stop // window, count)
        if last - first >= 2:
            chapter_W[first:last] = number
    return chapter_W


def nearest_rows(rows_ND: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Find for each row the nearest other row by cosine; returns these and all cosines, -inf for a row and itself.

    Shapes: rows [N, D] -> [N], [N, N].
    """
    unit_ND = rows_ND.astype(np.float64)
    unit_ND /= np.linalg.norm(unit_ND, axis=1, keepdims=True)
    cosine_NN = unit_ND @ unit_ND.T
    np.fill_diagonal(cosine_NN, -np.inf)
    return cosine_NN.argmax(1), cosine_NN


@final
class ContrastiveTask(ModelTask):
    """A task of normalised temperature-scaled cross entropy over window means, and of the next token's cross entropy.

    Validated by the share of a held-out text's windows whose nearest other window is of the same chapter, each read
    alone, and by bits per byte.

    Reference: van den Oord et al. 2018 (InfoNCE); Chen et al. 2020, Eq. 1 (both windows are queries).
    """

    model: LanguageModel

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        data = cast(TextDataConfig, config.data)
        self._data = data
        self._contrast = ContrastConfig() if config.contrast is None else config.contrast
        self._tokeniser: Tokeniser = load_tokeniser(data.tokeniser)
        self.sequences_per_row = 2 * self._contrast.chapters
        self._pairs = _read_pairs(config, self._contrast, self._tokeniser, progress)
        self._trained_on = digests_of(data.train_files)
        self._validation = read_validation_text(data)
        super().__init__(config, share)
        self.criterion = None if self._validation is None else Criterion("same_chapter", "higher")

    def loss(self, step: int, rows: slice) -> Tensor:
        """Read all rows' windows at once, side by side: [rows x chapters x 2, segment]."""
        # Without a row, take part in every exchange and count nothing.
        own = range(self.batch)[rows] or range(1)
        row_windows, segment = self.sequences_per_row, self._data.segment
        windows_NT = torch.cat([self._pairs.row(step, number) for number in own])
        tokens = self._share.tokens(segment)
        ops = self._share.ops(segment)
        with self._autocast():
            h_NLD, _ = self.model.hidden(windows_NT[:, tokens], ops)
        mean_ND = ops.sum_over_sequence(h_NLD.to(torch.promote_types(h_NLD.dtype, torch.float32))) / segment
        contrasts = [contrast_loss(row_ND, self._contrast.temperature) for row_ND in mean_ND.split(row_windows)]
        loss = torch.stack(contrasts).sum() * self._share.replica_weight
        if self._contrast.language_weight:
            # The last token of a window has nothing to predict; the others' targets are the tokens after them.
            targets_NL = send(windows_NT[:, tokens.start + 1 : tokens.stop + 1], self._share.device)
            kept_NLD = h_NLD[:, : targets_NL.shape[1]]
            with self._autocast():
                nats = token_loss(self.model.readout, kept_NLD.flatten(0, 1), targets_NL.flatten())
            loss = loss + self._contrast.language_weight * nats / (row_windows * (segment - 1))
        return loss / self.batch if rows.stop > rows.start else loss * 0.0

    def validate(self) -> dict[str, float | int]:
        if self._validation is None:
            return {}
        tokens = self._tokeniser.encode(self._validation)
        score = score_tokens(self.model, tokens, len(self._validation))
        language_scores = {"bits_per_byte": score.bits_per_byte, "bytes": score.num_bytes}
        window = self._contrast.validation_window
        chapters = find_chapters(self._validation, tokens, self._tokeniser, 2 * window)
        rows_WD = window_rows(self.model, tokens, window, carried=False)
        chapter_W = chapters_of_windows(chapters, len(rows_WD), window)
        inside = chapter_W >= 0
        nearest = nearest_rows(rows_WD[inside])[0] if inside.any() else np.empty(0, dtype=np.int64)
        same = chapter_W[inside][nearest] == chapter_W[inside]
        return {"same_chapter": float(same.mean()) if len(same) else 0.0, "windows": len(same), **language_scores}

    def seen(self, steps: int) -> int:
        return steps * self.batch * 2 * self._contrast.chapters * self._data.segment

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        contrast = self._contrast.model_dump(mode="json")
        begin_from = self._config.run.begin_from
        began = {} if begin_from is None else {"began_from": begin_from.name}
        facts = {"trained_on": self._trained_on, "contrast": contrast, **began, **facts}
        save_model(self.model, folder, tokeniser=self._tokeniser, half=True, facts=facts, weights=weights)


def contrast_loss(mean_ND: Tensor, temperature: float) -> Tensor:
    """The mean over all windows of -log p(its twin), among all windows but itself; rows 2i and 2i + 1 are twins.

    Shapes: [N, D] -> scalar.
    """
    unit_ND = F.normalize(mean_ND, dim=-1)
    logits_NN = unit_ND @ unit_ND.T / temperature
    number_N = torch.arange(len(unit_ND), device=unit_ND.device)
    itself_NN = number_N[:, None] == number_N
    return F.cross_entropy(logits_NN.masked_fill(itself_NN, -math.inf), number_N ^ 1)


@final
class ChapterPairs:
    """Row `r` of step `s`: two windows that do not overlap from each of some chapters, of a few books.

    A pure function of the seed, the step and the row. Chapters of the same book are there to be told apart as well:
    they share author and people, so what is left is what happens in them.
    """

    def __init__(
        self,
        books: list[tuple[NDArray[np.int32], tuple[Chapter, ...]]],
        contrast: ContrastConfig,
        window: int,
        seed: int,
    ) -> None:
        self._per_book = contrast.chapters // contrast.books
        self._books = [(tokens, chapters) for tokens, chapters in books if len(chapters) >= self._per_book]
        self._contrast, self._window, self._seed = contrast, window, seed
        if len(self._books) < contrast.books:
            raise ConfigError(
                f"{len(self._books)} of the texts have {self._per_book} chapters of two windows of {window} tokens; "
                f"{contrast.books} are needed. Give more texts, or a smaller contrast.books or data.segment"
            )

    def row(self, step: int, row: int) -> Tensor:
        """Draw the windows of a row. Shapes: [2 x chapters, window] int64, the two of a chapter one after the other."""
        draw = np.random.default_rng((self._seed, step, row))
        windows = []
        for book in draw.choice(len(self._books), self._contrast.books, replace=False):
            tokens, chapters = self._books[book]
            for number in draw.choice(len(chapters), self._per_book, replace=False):
                for start in _two_starts(draw, chapters[number], self._window):
                    windows.append(np.asarray(tokens[start : start + self._window]))
        return torch.from_numpy(np.stack(windows).astype(np.int64))


def _two_starts(draw: np.random.Generator, chapter: Chapter, window: int) -> tuple[int, int]:
    """Draw the starts of two windows that do not overlap: all such pairs are equally likely, in either order."""
    room = chapter.stop - chapter.start - 2 * window
    first, second = sorted(int(place) for place in draw.choice(room + 2, 2, replace=False))
    starts = (chapter.start + first, chapter.start + second - 1 + window)
    return starts if draw.random() < 0.5 else starts[::-1]


def _read_pairs(
    config: TrainingConfig, contrast: ContrastConfig, tokeniser: Tokeniser, progress: Progress
) -> ChapterPairs:
    data = cast(TextDataConfig, config.data)
    books = []
    for path in data.train_files:
        if path.is_dir() or path.suffix in (".jsonl", ".gz"):
            raise ConfigError(f"{path} was given to a run with [contrast]; chapters are looked for in plain text files")
        # Tokens of one book at a time; the end token behind it belongs to no chapter.
        tokens = tokenise_files((path,), tokeniser, config.run.folder / "cache", progress=progress)
        books.append((tokens, find_chapters(path.read_bytes(), tokens, tokeniser, 2 * data.segment)))
    return ChapterPairs(books, contrast, data.segment, config.run.seed)


def language_task(config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> Task:
    """The task of a language model: encodings of chapters with a [contrast] section, else its texts."""
    return (LanguageTask if config.contrast is None else ContrastiveTask)(config, share, progress)

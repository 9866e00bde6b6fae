"""Encodings: two windows of one chapter are to be nearer than windows of others; the language loss goes along.

A row of a batch is a set of chapters that are told apart from each other, so its loss depends on no other row.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.models import LanguageModel
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.chapters import Chapter, find_chapters
from dist_attn.training.config import ContrastConfig, TrainingConfig
from dist_attn.training.data import tokenise_files
from dist_attn.training.datasets.config import TextDataConfig
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.evaluation import score_tokens
from dist_attn.training.first_model import first_model
from dist_attn.training.language_task import read_validation_text
from dist_attn.training.retrieval import chapters_of_windows, nearest_rows, window_rows
from dist_attn.training.task import Criterion, Share, Task
from dist_attn.training.token_loss import token_loss

__all__ = ["ChapterPairs", "ContrastiveTask", "contrast_loss"]


@final
class ContrastiveTask(Task):
    """Normalised temperature-scaled cross entropy over window means, and the next token's cross entropy.

    Validated by the share of a held-out text's windows whose nearest other window is of the same chapter, each read
    alone, and by bits per byte.

    Reference: van den Oord et al. 2018 (InfoNCE); Chen et al. 2020, Eq. 1 (both windows are queries).
    """

    model: LanguageModel

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        data = cast(TextDataConfig, config.data)
        self._config, self._data, self._share = config, data, share
        self._contrast = ContrastConfig() if config.contrast is None else config.contrast
        self._tokeniser: Tokeniser = load_tokeniser(data.tokeniser)
        self._pairs = _read_pairs(config, self._contrast, self._tokeniser, progress)
        self._validation = read_validation_text(data)
        super().__init__(first_model(config.model, config.run.begin_from).to(share.device), data.batch)
        self.criterion = None if self._validation is None else Criterion("same_chapter", "higher")

    def prepare(self, step: int) -> None:
        self.model.redraw(step)

    def loss(self, step: int, rows: slice) -> Tensor:
        """All rows' windows are read at once, side by side: [rows x chapters x 2, segment]."""
        # Without a row, take part in every exchange and count nothing.
        own = range(self.batch)[rows] or range(1)
        row_windows, segment = 2 * self._contrast.chapters, self._data.segment
        windows_NT = torch.cat([self._pairs.row(step, number) for number in own])
        tokens = self._share.tokens(segment)
        ops = self._share.ops(segment)
        with self._autocast():
            h_NLD, _ = self.model.hidden(windows_NT[:, tokens].to(self._share.device), ops)
        mean_ND = ops.sum_over_sequence(h_NLD.to(torch.promote_types(h_NLD.dtype, torch.float32))) / segment
        contrasts = [contrast_loss(row_ND, self._contrast.temperature) for row_ND in mean_ND.split(row_windows)]
        loss = torch.stack(contrasts).sum() * self._share.replica_weight
        if self._contrast.language_weight:
            # The last token of a window has nothing to predict; the others' targets are the tokens after them.
            targets_NL = windows_NT[:, tokens.start + 1 : tokens.stop + 1].to(self._share.device)
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
        found = {"bits_per_byte": score.bits_per_byte, "bytes": score.num_bytes}
        window = self._contrast.validation_window
        chapters = find_chapters(self._validation, tokens, self._tokeniser, 2 * window)
        rows_WD = window_rows(self.model, tokens, window, carried=False)
        chapter_W = chapters_of_windows(chapters, len(rows_WD), window)
        inside = chapter_W >= 0
        nearest = nearest_rows(rows_WD[inside])[0] if inside.any() else np.empty(0, dtype=np.int64)
        same = chapter_W[inside][nearest] == chapter_W[inside]
        return {"same_chapter": float(same.mean()) if len(same) else 0.0, "windows": len(same), **found}

    def seen(self, steps: int) -> int:
        return steps * self.batch * 2 * self._contrast.chapters * self._data.segment

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        contrast = self._contrast.model_dump(mode="json")
        begin_from = self._config.run.begin_from
        began = {} if begin_from is None else {"began_from": begin_from.name}
        facts = {"trained_on": [path.name for path in self._data.train], "contrast": contrast, **began, **facts}
        save_model(self.model, folder, tokeniser=self._tokeniser, half=True, facts=facts, weights=weights)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._share.device.type, dtype=torch.bfloat16, enabled=self._config.run.bf16)


def contrast_loss(mean_ND: Tensor, temperature: float) -> Tensor:
    """Mean over all windows of -log p(its twin), among all windows but itself; rows 2i and 2i + 1 are twins.

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
        """Shapes: [2 x chapters, window] int64, the two windows of a chapter one after the other."""
        draw = np.random.default_rng((self._seed, step, row))
        windows = []
        for book in draw.choice(len(self._books), self._contrast.books, replace=False):
            tokens, chapters = self._books[book]
            for number in draw.choice(len(chapters), self._per_book, replace=False):
                for start in _two_starts(draw, chapters[number], self._window):
                    windows.append(np.asarray(tokens[start : start + self._window]))
        return torch.from_numpy(np.stack(windows).astype(np.int64))


def _two_starts(draw: np.random.Generator, chapter: Chapter, window: int) -> tuple[int, int]:
    """Where two windows begin that do not overlap: all such pairs are equally likely, in either order."""
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

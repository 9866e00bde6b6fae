"""Parallel text: line n of one file is the translation of line n of the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser
from dist_attn.training.datasets.config import FileDataConfig, register_data
from dist_attn.training.datasets.examples import permutation
from dist_attn.training.datasets.text_sources import lines
from dist_attn.training.datasets.token_cache import Progress, TokenTable, cached_texts, digest_of, reading

__all__ = ["NO_TOKEN", "PairBatch", "PairBatches", "ParallelTextConfig", "ParallelTexts", "read_parallel_texts"]

NO_TOKEN = -100
"""The filler of `next_BL` where a target has ended: no token is to be foretold there (torch's `ignore_index`)."""


class ParallelTextConfig(FileDataConfig):
    """Sources and targets in two files each (relative to `folder`), plain or gzipped, line by line."""

    kind: Literal["parallel_text"] = "parallel_text"
    train_source: Path
    train_target: Path
    validation_source: Path | None = None
    validation_target: Path | None = None
    tokeniser: Path
    # The tokeniser of targets with a vocabulary of their own; `tokeniser` is then that of the sources.
    target_tokeniser: Path | None = None
    batch: int = Field(default=64, ge=1)
    # Pairs with a longer side are left out.
    max_length: int = Field(default=128, ge=1)
    # The number of first validation sources that are translated at every validation, into translations.txt.
    translations: int = Field(default=0, ge=0)
    beams: int = Field(default=1, ge=1, le=1024)
    length_penalty: float = Field(default=0.6, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _both_sides(self) -> "ParallelTextConfig":
        if (self.validation_source is None) != (self.validation_target is None):
            raise ValueError("validation needs a source and a target; give both or neither")
        if self.translations and self.validation_source is None:
            raise ValueError("translations are made of the validation sources; give validation_source and _target")
        return self

    def tokenisers(self) -> tuple[Path | None, Path | None]:
        return (self.tokeniser, None) if self.target_tokeniser is None else (self.target_tokeniser, self.tokeniser)

    @property
    def train_files(self) -> tuple[Path, Path]:
        """Source and target, found from `folder`."""
        return self.found(self.train_source), self.found(self.train_target)

    @property
    def validation_files(self) -> tuple[Path, Path] | None:
        """Source and target, found from `folder`."""
        if self.validation_source is None or self.validation_target is None:
            return None
        return self.found(self.validation_source), self.found(self.validation_target)


register_data(ParallelTextConfig)


@dataclass(frozen=True)
class ParallelTexts:
    """Sources and targets as tokens, without begin or end, pair by pair, and the numbers of the pairs that are used."""

    sources: TokenTable
    targets: TokenTable
    kept: NDArray[np.int64]

    @property
    def left_out(self) -> int:
        """The number of pairs that are too long to be used."""
        return len(self.sources) - len(self.kept)


def read_parallel_texts(
    paths: tuple[Path, Path],
    tokenisers: tuple[Tokeniser, Tokeniser],
    cache_folder: Path,
    *,
    max_length: int,
    progress: Progress,
) -> ParallelTexts:
    """Read the pairs of two files, plain or gzipped, source first, but those with a side above `max_length` tokens.

    Raises: ConfigError naming file and line for an empty side, and for files of different numbers of lines.
    """
    sides = [_side(path, tokeniser, cache_folder, progress) for path, tokeniser in zip(paths, tokenisers, strict=True)]
    sources, targets = sides
    if len(sources) != len(targets):
        raise ConfigError(
            f"{paths[0]} has {len(sources)} lines and {paths[1]} has {len(targets)}; line n of one must be line n of "
            "the other in another language"
        )
    if not len(sources):
        raise ConfigError(f"{paths[0]} is empty; give at least one pair of lines")
    fits = (sources.lengths <= max_length) & (targets.lengths <= max_length)
    if not fits.any():
        raise ConfigError(f"no pair of {paths[0]} and {paths[1]} fits in data.max_length = {max_length}; raise it")
    return ParallelTexts(sources, targets, np.flatnonzero(fits))


def _side(path: Path, tokeniser: Tokeniser, cache_folder: Path, progress: Progress) -> TokenTable:
    def texts() -> Iterator[NDArray[np.int32]]:
        for number, line in lines(path, reading([path], progress)(path)):
            if not line.strip():
                raise ConfigError(f"{path}, line {number} is empty; take the pair out of both files")
            yield tokeniser.encode(line)

    return cached_texts(cache_folder, f"lines-{digest_of([path], tokeniser.digest)}", texts)


@dataclass(frozen=True)
class PairBatch:
    """A batch of sources of one length, and of targets padded to the longest.

    source_BS ends with the source's end token. target_BL begins with the target's end token, as if after an earlier
    text; next_BL is what comes after each of its tokens, the end token last, and NO_TOKEN behind that: in a row that
    only fills the batch up, everywhere.
    """

    source_BS: torch.Tensor
    target_BL: torch.Tensor
    next_BL: torch.Tensor

    def rows(self, start: int, stop: int) -> "PairBatch":
        """Some rows of the batch."""
        return PairBatch(self.source_BS[start:stop], self.target_BL[start:stop], self.next_BL[start:stop])

    @property
    def num_targets(self) -> int:
        """The number of tokens to foretell, end tokens among them."""
        return int((self.next_BL != NO_TOKEN).sum())


class PairBatches:
    """Batches of pairs whose sources have one length each, shuffled anew every epoch: a function of the step.

    So no source is padded, in whose place an encoder would see something. Targets are, behind their end, where no
    earlier token of a causal decoder looks. Pairs of one length that do not fill a batch make a smaller one, filled up
    with rows that count for nothing: all batches have `batch` rows, however these are shared out.

    Raises: ConfigError for fewer pairs than a batch.
    """

    def __init__(self, pairs: ParallelTexts, batch: int, seed: int, ends: tuple[int, int]) -> None:
        if len(pairs.kept) < batch:
            raise ConfigError(
                f"the parallel text has {len(pairs.kept)} pairs (and {pairs.left_out} that are too long); a batch "
                f"needs {batch}. Give more text, or a smaller data.batch"
            )
        self._pairs, self._batch, self._seed, self._ends = pairs, batch, seed, ends
        self._source_lengths = pairs.sources.lengths[pairs.kept]
        self._target_lengths = pairs.targets.lengths[pairs.kept]
        self._plan = lru_cache(maxsize=2)(self._plan_epoch)
        _, counts = np.unique(self._source_lengths, return_counts=True)
        self.per_epoch = int((-(-counts // batch)).sum())  # batches, in every epoch as many

    def __call__(self, step: int) -> PairBatch:
        """The batch of a step."""
        return self._collate(self.pair_numbers(step))

    def pair_numbers(self, step: int) -> NDArray[np.int64]:
        """The numbers of the lines that a step reads, counted from 0."""
        epoch, place = divmod(step, self.per_epoch)
        return self._pairs.kept[self._plan(epoch)[place]]

    def pairs_before(self, step: int) -> int:
        """The number of pairs that the steps before this one read; rows that fill a batch up are none."""
        epochs, place = divmod(step, self.per_epoch)
        return epochs * len(self._pairs.kept) + sum(map(len, self._plan(epochs)[:place]))

    def _plan_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """Plan the epoch's batches: like lengths together, the rest and the order of the batches by chance."""
        order = permutation(self._seed, 2 * epoch, len(self._source_lengths))
        order = order[np.lexsort((self._target_lengths[order], self._source_lengths[order]))]  # stable
        _, starts = np.unique(self._source_lengths[order], return_index=True)
        batches = [
            group[at : at + self._batch]
            for group in np.split(order, starts[1:])
            for at in range(0, len(group), self._batch)
        ]
        return [batches[place] for place in permutation(self._seed, 2 * epoch + 1, len(batches))]

    def _collate(self, numbers: NDArray[np.int64]) -> PairBatch:
        pairs, (source_end, target_end) = self._pairs, self._ends
        rows = [*numbers, *[numbers[0]] * (self._batch - len(numbers))]
        source_BS = np.stack([np.append(pairs.sources[row], source_end) for row in rows])
        targets = [pairs.targets[row] for row in rows]
        longest = max(len(target) for target in targets) + 1
        target_BL = np.full((len(rows), longest), target_end)
        next_BL = np.full((len(rows), longest), NO_TOKEN)
        for row, target in enumerate(targets):
            target_BL[row, 1 : len(target) + 1] = target
            if row < len(numbers):
                next_BL[row, : len(target)], next_BL[row, len(target)] = target, target_end
        return PairBatch(*(torch.from_numpy(array.astype(np.int64)) for array in (source_BS, target_BL, next_BL)))

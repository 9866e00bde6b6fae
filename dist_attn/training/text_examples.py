"""Labelled texts of either kind of data, as a classifier takes them: tokens and class by number."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.datasets.config import LabelledTextConfig, ListOpsConfig, NeedlesConfig
from dist_attn.training.datasets.labelled_text import LabelledTexts, read_labelled_texts
from dist_attn.training.datasets.labels import Label, LabelNames
from dist_attn.training.datasets.listops import NUM_CLASSES, VOCAB_SIZE, ListOps
from dist_attn.training.datasets.needles import Needles
from dist_attn.training.datasets.token_cache import Progress

__all__ = ["ReaderSizes", "TextExamples", "TextSets", "read_text_sets"]


class TextExamples(Protocol):
    """Texts, or pairs of texts, with a class each."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> tuple[tuple[Tensor, ...], int]:
        """Tokens [T] of each text of an example, and its class."""
        ...


@dataclass(frozen=True)
class TextSets:
    """What a text classifier is trained on: examples, held-out ones, the classes' names, and where tokens come from."""

    train: TextExamples
    validation: TextExamples | None
    labels: tuple[Label, ...]
    tokeniser: Tokeniser | None


@dataclass(frozen=True)
class ReaderSizes:
    """What of a model its examples must fit: its tokens, its classes, and how many texts are classified together."""

    vocab_size: int
    num_classes: int
    texts: int = 1


def read_text_sets(
    data: LabelledTextConfig | ListOpsConfig | NeedlesConfig, model: ReaderSizes, cache: Path, progress: Progress
) -> TextSets:
    """The examples that [data] names, which fit the model.

    Raises: ConfigError for examples that are missing, malformed, or do not fit.
    """
    given = len(data.text_fields) if isinstance(data, LabelledTextConfig) else 1
    if given != model.texts:
        raise ConfigError(
            f"model.texts is {model.texts} and the examples of [data] have {given}: pairs need model.texts = 2 and "
            "labelled_text with data.second_text_field, single texts neither"
        )
    match data:
        case ListOpsConfig():
            return _listops(data, model)
        case NeedlesConfig():
            return _needles(data, model)
    return _read(data, model, cache, progress)


@dataclass(frozen=True)
class _Read:
    texts: LabelledTexts
    classes_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> tuple[tuple[Tensor, ...], int]:
        texts = (torch.from_numpy(text.astype(np.int64)) for text in self.texts.texts_of(number))
        return tuple(texts), int(self.classes_N[number])


@dataclass(frozen=True)
class _MadeUp:
    sequences: ListOps | Needles
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[tuple[Tensor, ...], int]:
        tokens, value = self.sequences(self.first + number)
        return (torch.from_numpy(tokens),), value


def _read(data: LabelledTextConfig, model: ReaderSizes, cache: Path, progress: Progress) -> TextSets:
    tokeniser = load_tokeniser(data.tokeniser)
    if tokeniser.vocab_size != model.vocab_size:
        raise ConfigError(
            f"the tokeniser in {data.tokeniser} has {tokeniser.vocab_size} tokens, model.vocab_size is "
            f"{model.vocab_size}; they must be equal"
        )

    def texts(paths: tuple[Path, ...]) -> LabelledTexts:
        return read_labelled_texts(
            paths,
            tokeniser,
            cache,
            text_fields=data.text_fields,
            label_field=data.label_field,
            max_length=data.max_length,
            progress=progress,
        )

    train = texts(data.train_files)
    names = LabelNames.of(train.labels)
    names.check(model.num_classes)
    held_out = texts(data.validation_files) if data.validation_files else None
    validation = None if held_out is None else _Read(held_out, held_out.classes(names))
    return TextSets(_Read(train, train.classes(names)), validation, names.names, tokeniser)


def _listops(data: ListOpsConfig, model: ReaderSizes) -> TextSets:
    """Expressions 0, 1, … to train on, and those after them to validate."""
    _check_sizes("ListOps", model, (VOCAB_SIZE, NUM_CLASSES))
    expressions = ListOps(data.seed, data.min_length, data.max_length, data.max_depth, data.max_args)
    expressions(0)  # lengths that there are not are refused now
    return _made_up(expressions, data, NUM_CLASSES)


def _needles(data: NeedlesConfig, model: ReaderSizes) -> TextSets:
    needles = Needles(data.seed, data.length, data.noise, data.symbols, data.copies)
    _check_sizes("of needles this [data]", model, (needles.vocab_size, needles.classes))
    return _made_up(needles, data, needles.classes)


def _made_up(sequences: ListOps | Needles, data: ListOpsConfig | NeedlesConfig, classes: int) -> TextSets:
    validation = _MadeUp(sequences, data.examples, data.validation_examples) if data.validation_examples else None
    return TextSets(_MadeUp(sequences, 0, data.examples), validation, tuple(range(classes)), None)


def _check_sizes(what: str, model: ReaderSizes, needed: tuple[int, int]) -> None:
    if (model.vocab_size, model.num_classes) != needed:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size} and model.num_classes {model.num_classes}; {what} has {needed[0]} "
            f"tokens and {needed[1]} classes"
        )

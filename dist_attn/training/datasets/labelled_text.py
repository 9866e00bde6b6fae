"""Labelled texts, or pairs of them, as a classifier takes them: tokens and a class."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.errors import ConfigError
from dist_attn.model_config.registry import load_build
from dist_attn.shipped.folder_files import put_in_place
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.datasets.config import DataConfig, LabelledTextConfig
from dist_attn.training.datasets.examples import Label, LabelNames
from dist_attn.training.datasets.text_sources import field, is_jsonl, records
from dist_attn.training.datasets.token_cache import (
    Progress,
    TokenTable,
    cached_texts,
    digest_of,
    reading,
)


@dataclass(frozen=True)
class LabelledTexts:
    """Examples of `each` texts, one after the other as tokens; each example's label, and the name of their files."""

    texts: TokenTable
    labels: tuple[Label, ...]
    name: str
    each: int = 1

    def __len__(self) -> int:
        return len(self.labels)

    def texts_of(self, number: int) -> tuple[NDArray[np.int32], ...]:
        """The texts of an example."""
        return tuple(self.texts[self.each * number + part] for part in range(self.each))

    def classes(self, names: LabelNames) -> NDArray[np.int64]:
        """The class of each example.

        Raises: ConfigError for a label that is not among the names.
        """
        numbered = (names.number(label, f"{self.name}, example {i}") for i, label in enumerate(self.labels, 1))
        return np.fromiter(numbered, dtype=np.int64, count=len(self.labels))


def read_labelled_texts(
    paths: Sequence[Path],
    tokeniser: Tokeniser,
    cache_folder: Path,
    *,
    text_fields: tuple[str, ...],
    label_field: str,
    max_length: int,
    progress: Progress,
) -> LabelledTexts:
    """Read the examples of all files in order, a text of each of the fields; each text's first `max_length` tokens.

    Raises: ConfigError naming file and line of what is missing, empty or of another kind.
    """
    for path in paths:
        if not is_jsonl(path):
            raise ConfigError(f"labelled text {path} is not .jsonl or .jsonl.gz; each line needs a text and a label")
    key = digest_of(paths, tokeniser.digest, *text_fields, label_field, str(max_length))
    name = f"labelled-{key}"
    labels: list[Label] = []

    def texts() -> Iterator[NDArray[np.int32]]:
        progress_of = reading(paths, progress)
        for path in paths:
            for number, record in records(path, progress_of(path)):
                own = [field(record, name, str, path, number) for name in text_fields]
                labels.append(field(record, label_field, (str, int), path, number))
                for text in own:
                    if not text:
                        raise ConfigError(f"{path}, line {number}: the text is empty; take the line out")
                    yield tokeniser.encode(text.encode(errors="surrogatepass"))[:max_length]
        # Beside the tokens and before them, so that where these are found both are.
        put_in_place(cache_folder / f"{name}.labels.json", json.dumps(labels).encode())

    table = cached_texts(cache_folder, name, texts)
    shown = " and ".join(path.name for path in paths)
    if not len(table):
        needed = ", ".join(map(repr, text_fields))
        raise ConfigError(f"{shown} has no examples; each line needs an object with {needed} and {label_field!r}")
    kept = tuple(json.loads((cache_folder / f"{name}.labels.json").read_bytes()))
    return LabelledTexts(table, kept, shown, len(text_fields))


class TextExamples(Protocol):
    """Texts, or pairs of texts, with a class each."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> tuple[tuple[Tensor, ...], int]:
        """Tokens [T] of each text of an example, and its class."""
        ...


@dataclass(frozen=True)
class TextSets:
    """The data of a text classifier: examples, held-out ones, the classes' names, and the tokeniser of the texts."""

    train: TextExamples
    validation: TextExamples | None
    labels: tuple[Label, ...]
    tokeniser: Tokeniser | None


@dataclass(frozen=True)
class ReaderSizes:
    """The sizes of a model that its examples must fit: its tokens, its classes, and the texts classified together."""

    vocab_size: int
    num_classes: int
    texts: int = 1


def read_text_sets(data: DataConfig, model: ReaderSizes, cache: Path, progress: Progress) -> TextSets:
    """Read the examples that [data] names, which fit the model.

    Raises: ConfigError for examples that are missing, malformed, or do not fit.
    """
    texts = len(data.text_fields) if isinstance(data, LabelledTextConfig) else 1
    if texts != model.texts:
        raise ConfigError(
            f"model.texts is {model.texts} and the examples of [data] have {texts}: pairs need model.texts = 2 and "
            "labelled_text with data.second_text_field, single texts neither"
        )
    read = DataConfig.registry.find(data.kind).texts
    assert read is not None  # the configuration of a run takes no other data for such a task
    return cast(TextSets, load_build(read)(data, model, cache, progress))


@dataclass(frozen=True)
class _Read:
    texts: LabelledTexts
    classes_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> tuple[tuple[Tensor, ...], int]:
        texts = (torch.from_numpy(text.astype(np.int64)) for text in self.texts.texts_of(number))
        return tuple(texts), int(self.classes_N[number])


def read_files(data: LabelledTextConfig, model: ReaderSizes, cache: Path, progress: Progress) -> TextSets:
    """Read labelled texts from `.jsonl` files; the labels of the training files in order are the classes."""
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

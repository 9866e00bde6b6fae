"""Labelled texts, or pairs of them, from `.jsonl` files: tokens of at most one length each, and classes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser
from dist_attn.training.datasets.labels import Label, LabelNames
from dist_attn.training.datasets.text_sources import field, is_jsonl, records
from dist_attn.training.datasets.token_cache import (
    Progress,
    TokenTable,
    cached_texts,
    digest_of,
    put_in_place,
    reading,
)

__all__ = ["LabelledTexts", "read_labelled_texts"]


@dataclass(frozen=True)
class LabelledTexts:
    """Examples of so many texts `each`, one after the other as tokens; the label of each, and where they stand."""

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
    """The examples of all files in order, a text of each of the fields; of each text the first `max_length` tokens.

    Raises: ConfigError naming file and line of what is missing, empty or of another kind.
    """
    for path in paths:
        if not is_jsonl(path):
            raise ConfigError(f"labelled text {path} is not .jsonl or .jsonl.gz; each line needs a text and a label")
    key = digest_of(paths, tokeniser.digest, *text_fields, label_field, str(max_length))
    name = f"labelled-{key}"
    labels: list[Label] = []

    def texts() -> Iterator[NDArray[np.int32]]:
        told = reading(paths, progress)
        for path in paths:
            for number, record in records(path, told(path)):
                own = [field(record, name, str, path, number) for name in text_fields]
                labels.append(field(record, label_field, (str, int), path, number))
                for text in own:
                    if not text:
                        raise ConfigError(f"{path}, line {number}: the text is empty; take the line out")
                    yield tokeniser.encode(text.encode(errors="surrogatepass"))[:max_length]
        # Beside the tokens and before them, so that whoever finds these finds both.
        put_in_place(cache_folder / f"{name}.labels.json", json.dumps(labels).encode())

    table = cached_texts(cache_folder, name, texts)
    shown = " and ".join(path.name for path in paths)
    if not len(table):
        needed = ", ".join(map(repr, text_fields))
        raise ConfigError(f"{shown} has no examples; each line needs an object with {needed} and {label_field!r}")
    kept = tuple(json.loads((cache_folder / f"{name}.labels.json").read_bytes()))
    return LabelledTexts(table, kept, shown, len(text_fields))

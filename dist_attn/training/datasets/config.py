"""The section [data] of a training file: one frozen value for each kind of data, unknown keys refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SerializeAsAny

from dist_attn.model_config.registry import Build, KindConfig, Registry, kinds_of, place_of

__all__ = [
    "AnyData",
    "DataConfig",
    "FileDataConfig",
    "LabelledTextConfig",
    "TextDataConfig",
    "register_data",
]


@dataclass(frozen=True)
class DataKind:
    """The configuration class of a kind of data, and what reads it as labelled texts, if it is such."""

    config: "type[DataConfig]"
    texts: Build | None = None


class DataConfig(KindConfig):
    """The data of a run; a package offers a kind by an entry point of the group `dist_attn.data`."""

    registry: ClassVar[Registry[DataKind]] = Registry("dist_attn.data", "data set")

    batch: int = Field(default=8, ge=1)
    # The parts into which the rows of a step are cut, worked on one after the other: less memory, the same result.
    micro_batches: int = Field(default=1, ge=1)

    def tokenisers(self) -> tuple[Path | None, Path | None]:
        """The folders of the tokeniser of the model, and of sources with a vocabulary of their own."""
        return None, None


class FileDataConfig(DataConfig):
    """Data that lie in files."""

    # The folder at which relative paths begin.
    folder: Path = Path()

    def found(self, path: Path) -> Path:
        """The place of a path."""
        return self.folder / path


class TextDataConfig(FileDataConfig):
    """Texts for a language model (relative to `folder`), cut into `batch` streams of segments with carried state."""

    kind: Literal["text"] = "text"
    # Files, folders of *.txt, and .jsonl; each file also gzipped.
    train: tuple[Path, ...] = Field(min_length=1)
    validation: Path | None = None
    # Bytes of the validation file that are scored during training; the whole file is for `evaluate`.
    validation_bytes: int = Field(default=300_000, ge=1)
    text_field: str = "text"
    tokeniser: Path
    segment: int = Field(default=512, ge=1)
    # False: every segment begins with the empty state, in training and in the validation score. For mixers whose state
    # grows with every token (softmax), or that are to learn nothing beyond a segment.
    stateful: bool = True

    def tokenisers(self) -> tuple[Path | None, Path | None]:
        return self.tokeniser, None

    @property
    def train_files(self) -> tuple[Path, ...]:
        """The training texts, found from `folder`."""
        return tuple(self.found(path) for path in self.train)

    @property
    def validation_file(self) -> Path | None:
        """The validation text, found from `folder`."""
        return None if self.validation is None else self.found(self.validation)


class LabelledTextConfig(FileDataConfig):
    """Texts, or pairs of texts, with a class each: `.jsonl` files (relative to `folder`) with a field for each."""

    kind: Literal["labelled_text"] = "labelled_text"
    train: tuple[Path, ...] = Field(min_length=1)
    validation: tuple[Path, ...] = ()
    text_field: str = "text"
    # The field of a pair's second text; for a model with texts = 2.
    second_text_field: str | None = None
    label_field: str = "label"
    tokeniser: Path
    # The most tokens of a text: longer ones are cut, shorter ones stay as they are.
    max_length: int = Field(default=1024, ge=1)

    def tokenisers(self) -> tuple[Path | None, Path | None]:
        return self.tokeniser, None

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields of an example's texts, in order."""
        return (self.text_field,) if self.second_text_field is None else (self.text_field, self.second_text_field)

    @property
    def train_files(self) -> tuple[Path, ...]:
        """The training texts, found from `folder`."""
        return tuple(self.found(path) for path in self.train)

    @property
    def validation_files(self) -> tuple[Path, ...]:
        """The validation texts, found from `folder`."""
        return tuple(self.found(path) for path in self.validation)


AnyData = SerializeAsAny[DataConfig]
"""The type of a field that holds data of any kind."""


def register_data(config: type[DataConfig], texts: Build | None = None) -> None:
    """Make a kind of data known.

    Where `texts` is given, every task of labelled texts takes this kind too: it makes the `TextSets` of a
    configuration, a model's sizes, a folder for what is cached and a `Progress`.

    Raises: ConfigError for a kind that is registered already, and for a class that names no kind.
    """
    DataConfig.registry.register(kinds_of(config), DataKind(config, texts), place_of(config))


register_data(TextDataConfig)
register_data(LabelledTextConfig, "dist_attn.training.datasets.labelled_text:read_files")

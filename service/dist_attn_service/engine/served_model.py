"""The facts of a served model that the API reads from its folder; never its weights."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dist_attn.errors import ModelFolderError
from dist_attn.shipped import origin, without_classes
from dist_attn.shipped.downloaded import read_downloaded
from dist_attn.shipped.folder_files import read_file, read_json_object
from dist_attn.shipped.generation_config import read_generation_defaults
from dist_attn.wire.specs import SequenceReading

__all__ = ["ServedModel"]

SERVED = ("", "language_model", "text_encoder", "stream_encoder")


class _Kind(msgspec.Struct):
    kind: str = ""


class _Sizes(msgspec.Struct):
    vocab_size: int
    hidden_size: int
    num_layers: int | None = None


class _Width(msgspec.Struct):
    hidden_size: int


class _TextEncoder(msgspec.Struct):
    vocab_size: int
    encoder: _Width
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    prefix: list[int] = []
    suffix: list[int] = []
    pooling: Literal["mean", "first"] = "mean"
    normalise: bool = False


class _StreamEncoder(msgspec.Struct):
    sentence: _TextEncoder


@dataclass(frozen=True)
class ServedModel:
    """A model behind this service; `created` is a unix time in seconds.

    `reading` is how a text encoder reads, and `frame_tokens` how many tokens it puts around each text; a model whose
    `reading` is None takes texts of any length. `unit_vectors`: vectors of /v1/embeddings are scaled to length 1.
    """

    folder: str  # its name
    vocab_size: int
    hidden_size: int
    created: int
    reading: SequenceReading | None = None
    frame_tokens: int = 0
    writes: bool = True
    unit_vectors: bool = False
    digest: str = ""
    num_layers: int | None = None
    names: tuple[str, ...] = ()
    """The names that the model answers to; if empty, the folder's name."""
    drawing: Mapping[str, float | int] = field(default_factory=dict)
    """The options of drawing that hold where a request says nothing, by the names of `SamplingSpec`."""
    stop_strings: tuple[str, ...] = ()
    """The strings that end the answer of a chat where a request names none."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids that requests may name it by."""
        return self.names or (self.folder,)

    @property
    def id(self) -> str:
        """The id in answers."""
        return self.ids[0]

    @property
    def identity(self) -> str:
        """The folder's name with a digest of configuration and tokeniser: another model of that name has another."""
        return f"{self.folder}@{self.digest}"

    @property
    def capabilities(self) -> list[str]:
        """The routes of /v1 that this model answers."""
        return [*["completions"] * self.writes, "embeddings", "encodings", "search", "rerank"]

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a sequence at most, those around the text included; None: any length."""
        return None if self.reading is None else self.reading.text_tokens + self.frame_tokens

    @classmethod
    def read(cls, folder: Path, names: tuple[str, ...] = ()) -> "ServedModel":
        """The model of a folder, and the names that it answers to in place of the folder's.

        Raises: ModelFolderError when config.json or tokenizer.json is missing or unusable.
        """
        path = folder / "config.json"
        try:
            data, created = read_file(path), int(path.stat().st_mtime)
            values = read_json_object(path)  # as the ranks do: Python's Infinity is no JSON, and is in folders
            kind = msgspec.convert(values, _Kind).kind
            if kind not in SERVED and origin(folder) != "downloaded":
                raise ModelFolderError(f"{folder} holds a {kind}; served are language models and text encoders")
            tokeniser = folder / "tokenizer.json"
            if not tokeniser.is_file():
                raise ModelFolderError(f"{folder} has no tokenizer.json; needed is a model folder of this project")
            digest = hashlib.sha256(hashlib.sha256(without_classes(data)).digest() + read_file(tokeniser)).hexdigest()[
                :16
            ]
            made = partial(cls, folder.resolve().name, created=created, digest=digest, names=names)
            if origin(folder) == "downloaded":
                model = read_downloaded(folder)
                drawing, stops, layers = model.generation.sampling, model.generation.stop_strings, model.num_layers
                return made(model.vocab_size, model.hidden_size, num_layers=layers, drawing=drawing, stop_strings=stops)
            if kind == "stream_encoder":
                inner = msgspec.convert(values, _StreamEncoder).sentence
                unit = inner.normalise
                return made(inner.vocab_size, inner.encoder.hidden_size, writes=False, unit_vectors=unit)
            if kind != "text_encoder":
                sizes = msgspec.convert(values, _Sizes)
                stops = read_generation_defaults(folder, sizes.vocab_size).stop_strings
                return made(sizes.vocab_size, sizes.hidden_size, num_layers=sizes.num_layers, stop_strings=stops)
            encoder = msgspec.convert(values, _TextEncoder)
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ModelFolderError(f"{path} is not a model's configuration: {error}") from None
        frame = len(encoder.prefix) + len(encoder.suffix)
        reading = SequenceReading(encoder.max_tokens - frame, encoder.pooling)
        size = encoder.encoder.hidden_size
        return made(encoder.vocab_size, size, reading=reading, frame_tokens=frame, writes=False)

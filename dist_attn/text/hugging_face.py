"""The files tokenizer.json and tokenizer_config.json of Hugging Face's format: writing them, and taking ours apart."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.folder_files import find_json_object, put_in_place
from dist_attn.text.base import Vocabulary

__all__ = [
    "CONFIG_NAME",
    "END_TEXT",
    "FILE_NAME",
    "SPECIAL_NAME",
    "WRITTEN_BY",
    "Contents",
    "printable",
    "raw",
    "read_tokenizer_json",
    "write_tokenizer_config",
    "write_tokenizer_json",
]

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIAL_NAME = "special_tokens_map.json"
END_TEXT = "<|end|>"
WRITTEN_BY = {"written_by": "dist-attn"}
"""The entry of tokenizer_config.json that marks a tokeniser of this project; without it the tokens are another's."""


def _printable_alphabet() -> str:
    """Make the alphabet of bytes: a printable one stands for itself, others for the next from U+0100 on (as GPT-2)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return "".join(chr(value if value in shown else next(hidden)) for value in range(256))


_ALPHABET = _printable_alphabet()
_BYTE_OF = {character: value for value, character in enumerate(_ALPHABET)}
_TO_PRINTABLE = dict(enumerate(_ALPHABET))


def printable(piece: bytes) -> str:
    """Write bytes in the printable alphabet of BPE files, one character for each."""
    return piece.decode("latin-1").translate(_TO_PRINTABLE)


def raw(text: str) -> bytes:
    """Return the bytes that `printable` came from; KeyError for a character outside the alphabet."""
    return bytes(_BYTE_OF[character] for character in text)


class Contents(NamedTuple):
    """All that decides the tokens: the pattern of the cut (None: no cut), the merges, and the bytes of each id."""

    split_pattern: str | None
    merges: tuple[tuple[bytes, bytes], ...]
    pieces: tuple[bytes, ...]


def write_tokenizer_json(
    folder: Path, vocabulary: Vocabulary, merges: tuple[tuple[bytes, bytes], ...], *, split_pattern: str | None
) -> None:
    """Write tokenizer.json, and tokenizer_config.json before it; neither file is ever seen half-written."""
    ids = {printable(piece): number for number, piece in enumerate(vocabulary.pieces)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": split_pattern}, "behavior": "Isolated", "invert": False}
    end = {"id": vocabulary.end_token, "content": END_TEXT, "special": True}
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            end | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [byte_level] if split_pattern is None else [split, byte_level],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids | {END_TEXT: vocabulary.end_token},
            "merges": [[printable(first), printable(second)] for first, second in merges],
        },
    }
    write_tokenizer_config(folder, END_TEXT, WRITTEN_BY)
    _write_json(folder / FILE_NAME, contents)


def write_tokenizer_config(folder: Path, end_text: str | None, more: dict[str, Any] | None = None) -> None:
    """Write the file that transformers needs beside tokenizer.json: it names the end token, which also pads.

    Batches are padded before their texts, because generation goes on from the last column.
    """
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "eos_token": end_text,
        "pad_token": end_text,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / CONFIG_NAME, about | (more or {}))


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    put_in_place(path, (json.dumps(contents, ensure_ascii=False, indent=1) + "\n").encode())


def read_tokenizer_json(path: Path) -> Contents:
    """Read the contents of a tokenizer.json of ours.

    Raises: ModelFolderError when the file is missing, unreadable, or was not written by `write_tokenizer_json`.
    """
    contents = find_json_object(path)
    if contents is None:
        raise ModelFolderError(
            f"{path} cannot be read (No such file or directory); a model folder needs the tokenizer.json it was "
            "trained with"
        )
    try:
        return _take_apart(contents)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        detail = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelFolderError(
            f"{path} is not a tokeniser of this package ({detail}); needed is a file that "
            "BpeTokeniser.save or ByteTokeniser.save wrote"
        ) from None


def _take_apart(contents: Any) -> Contents:
    model, steps = contents["model"], contents["pre_tokenizer"]["pretokenizers"]
    if model["type"] != "BPE":
        raise ValueError(f"its model is {model['type']!r}, not 'BPE'")
    if contents["normalizer"] is not None or model["dropout"] is not None:
        raise ValueError("it has a normalizer or dropout, which would change the bytes or the tokens")
    pattern = None if len(steps) == 1 else str(steps[0]["pattern"]["Regex"])
    ids = dict(model["vocab"])
    end = ids.pop(END_TEXT)
    in_order = sorted(ids, key=ids.__getitem__)
    if [ids[text] for text in in_order] != list(range(end)):
        raise ValueError(f"its ids do not run from 0 without a gap, with {END_TEXT!r} last")
    merges = tuple((raw(first), raw(second)) for first, second in model["merges"])
    return Contents(pattern, merges, tuple(raw(text) for text in in_order))

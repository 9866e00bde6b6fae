"""The sentence pairs of Multi30k, German to English: their lines, a vocabulary of both sides, sources, and BLEU."""

import gzip
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser
from dist_attn.text.train import train_bpe

__all__ = [
    "FOLDER",
    "SOURCE",
    "TARGET",
    "TRAIN",
    "VALIDATION",
    "bleu_of",
    "encoded_sources",
    "read_lines",
    "tokeniser_of",
]

FOLDER = "data/multi30k"
SOURCE, TARGET = "de", "en"
TRAIN, VALIDATION = "train", "val"


def read_lines(name: str, language: str) -> list[bytes]:
    """The sentences of one side of a part of Multi30k.

    Raises: ConfigError naming a file that is missing.
    """
    path = Path(FOLDER) / f"{name}.{language}.gz"
    if not path.is_file():
        raise ConfigError(f"{path} is not there; put Multi30k into {FOLDER}, as examples/train-translation.toml has it")
    return gzip.decompress(path.read_bytes()).splitlines()


def encoded_sources(lines: Sequence[bytes], tokeniser: Tokeniser) -> list[list[int]]:
    """Sources as the encoder takes them, with their end token."""
    end = tokeniser.end_token
    assert end is not None  # the vocabulary is made with one
    return [[*map(int, tokeniser.encode(line)), end] for line in lines]


def bleu_of(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of whole translations, by sacreBLEU with its own tokenisation (13a), cased.

    Raises: ConfigError where sacrebleu is not installed.
    """
    try:
        import sacrebleu
    except ImportError:
        raise ConfigError("BLEU is counted by sacrebleu, which is not installed: pip install sacrebleu") from None
    return float(sacrebleu.corpus_bleu(list(hypotheses), [list(references)]).score)


def tokeniser_of(made: Path, source: str, vocabulary: int) -> Path:
    """A BPE vocabulary of both sides of the training text, made once below `made`."""
    name = source.partition(".")[0]
    folder = made / f"tokeniser-{name}-{vocabulary}"
    if not folder.exists():
        beside = made / f"{folder.name}.{os.getpid()}"
        beside.mkdir(parents=True)
        texts = [beside / f"{name}.{language}" for language in (SOURCE, TARGET)]
        for path, language in zip(texts, (SOURCE, TARGET), strict=True):
            path.write_bytes(b"\n".join(read_lines(name, language)))
        train_bpe(texts, vocabulary).save(beside / "tokeniser")
        (beside / "tokeniser").rename(folder)
        shutil.rmtree(beside)
    return folder

"""The sentence pairs of Multi30k, German to English: their lines, a vocabulary of both sides, translations and BLEU."""

import gzip
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dist_attn.errors import ConfigError, extra_hint
from dist_attn.text import Tokeniser
from dist_attn.text.bpe import train_bpe
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.translation.beam_search import BeamSpec, translate
from dist_attn_papers.translation.model import EncoderDecoder

__all__ = [
    "FOLDER",
    "SIDES",
    "SOURCE",
    "TARGET",
    "TEST",
    "TRAIN",
    "VALIDATION",
    "bleu_of",
    "encoded_sources",
    "end_of",
    "read_lines",
    "tokeniser_of",
    "translated",
]

FOLDER = "data/multi30k"
SOURCE, TARGET = "de", "en"
TRAIN, VALIDATION, TEST = "train", "val", "test_2016_flickr"
SIDES = (("source", SOURCE), ("target", TARGET))
"""The sides of a pair as a training file calls them, and their languages."""


def read_lines(name: str, language: str) -> list[bytes]:
    """The sentences of one side of a part of Multi30k.

    Raises: ConfigError naming a file that is missing.
    """
    path = Path(FOLDER) / f"{name}.{language}.gz"
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there; put Multi30k into {FOLDER}, as papers/examples/train-translation.toml has it"
        )
    return gzip.decompress(path.read_bytes()).splitlines()


def encoded_sources(lines: Sequence[bytes], tokeniser: Tokeniser) -> list[list[int]]:
    """Sources as the encoder takes them, with their end token."""
    end = end_of(tokeniser)
    return [[*map(int, tokeniser.encode(line)), end] for line in lines]


def end_of(tokeniser: Tokeniser) -> int:
    """The token that ends a sentence; every vocabulary of `tokeniser_of` has one."""
    assert tokeniser.end_token is not None
    return tokeniser.end_token


def bleu_of(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of whole translations, by sacreBLEU with its own tokenisation (13a), cased.

    Raises: ConfigError where sacrebleu is not installed.
    """
    try:
        import sacrebleu
    except ImportError:
        raise ConfigError(f"BLEU is counted by sacrebleu, which is not installed: {extra_hint('dev')}") from None
    return float(sacrebleu.corpus_bleu(list(hypotheses), [list(references)]).score)


def translated(model: EncoderDecoder, tokeniser: Tokeniser, sources: Sequence[list[int]], beam: BeamSpec) -> list[str]:
    """What the model makes of sources as `encoded_sources` gives them: the text of each one's best translation."""
    found = translate(model, sources, beam, end_token=end_of(tokeniser))
    return [tokeniser.decode(list(best.tokens)).decode(errors="replace") for best, *_ in found]


def tokeniser_of(made: Path, source: str, vocabulary: int) -> Path:
    """A BPE vocabulary of both sides of the training text, made once below `made`."""
    name = source.partition(".")[0]

    def make(beside: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            texts = [Path(folder) / f"{name}.{language}" for language in (SOURCE, TARGET)]
            for path, language in zip(texts, (SOURCE, TARGET), strict=True):
                path.write_bytes(b"\n".join(read_lines(name, language)))
            train_bpe(texts, vocabulary).save(beside)

    return make_once(made / f"tokeniser-{name}-{vocabulary}", make)

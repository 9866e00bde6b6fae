"""Text as training segments: contiguous streams, so that each segment continues where the last one stopped."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser
from dist_attn.training.datasets.text_sources import documents, expand
from dist_attn.training.datasets.token_cache import (
    Progress,
    cached_texts,
    digest_of,
    nothing_shown,
    reading,
    tokens_of,
)

__all__ = ["SegmentStream", "tokenise_files"]


def tokenise_files(
    paths: tuple[Path, ...],
    tokeniser: Tokeniser,
    cache_folder: Path,
    *,
    text_field: str = "text",
    progress: Progress = nothing_shown,
) -> NDArray[np.int32]:
    """The tokens of all documents in order, an end token after each, memory-mapped from a cache keyed by content.

    A path is a text, a folder of *.txt, or `.jsonl` with a document in the `text_field` of every line.

    Raises: ConfigError naming a file that is missing, empty or damaged, with the line where there is one.
    """
    files = expand(paths)
    end = np.array([] if tokeniser.end_token is None else [tokeniser.end_token], dtype=np.int32)

    def texts() -> Iterator[NDArray[np.int32]]:
        told = reading(files, progress)
        for path in files:
            num_tokens = 0
            for document in documents(path, text_field, told(path)):
                before = num_tokens
                for tokens in tokens_of(tokeniser, document):
                    num_tokens += len(tokens)
                    yield tokens
                if num_tokens > before:
                    yield end
            if not num_tokens:
                raise ConfigError(f"training text {path} is empty; it needs at least one byte")

    key = digest_of(files, tokeniser.digest, text_field)
    return cached_texts(cache_folder, f"text-{key}", texts).tokens


class SegmentStream:
    """Batch b of step n holds `batch` segments; stream i of step n + 1 goes on where stream i of step n stopped.

    A pure function of the step, so a resumed run reads exactly what an undisturbed one would have read.
    """

    def __init__(self, tokens: np.ndarray, batch: int, segment: int) -> None:
        needed = batch * (segment + 1)
        if len(tokens) < needed:
            raise ConfigError(
                f"the corpus has {len(tokens)} tokens; one batch of {batch} segments of {segment} needs {needed}. "
                "Give more text, or a smaller data.batch or data.segment"
            )
        self._tokens, self._batch, self._segment = tokens, batch, segment

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and next-token targets of `step`, each [batch, segment] int64."""
        total = len(self._tokens)
        offsets_T = np.arange(self._segment + 1)
        starts_B = np.arange(self._batch) * total // self._batch + step * self._segment
        picked = torch.from_numpy(self._tokens[(starts_B[:, None] + offsets_T) % total].astype(np.int64))
        return picked[:, :-1], picked[:, 1:]

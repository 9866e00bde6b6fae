"""Text as training segments: contiguous streams, so that each segment continues where the last one stopped."""

import hashlib
from pathlib import Path

import numpy as np
import torch

from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser

__all__ = ["SegmentStream", "tokenise_files"]

_PIECE_BYTES = 1 << 20


def tokenise_files(paths: tuple[Path, ...], tokeniser: Tokeniser, cache_folder: Path) -> np.ndarray:
    """The tokens of all files in order, an end token after each, memory-mapped from a cache keyed by content.

    Raises: ConfigError naming a file that is missing or empty.
    """
    digest = hashlib.sha256(tokeniser.digest.encode())
    for path in paths:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"training text {path} cannot be read: {error.strerror}") from None
    cache = cache_folder / f"tokens-{digest.hexdigest()[:16]}.npy"
    if not cache.is_file():
        parts = []
        for path in paths:
            parts.append(_tokenise(path, tokeniser))
            if tokeniser.end_token is not None:
                parts.append(np.array([tokeniser.end_token], dtype=np.int32))
        cache_folder.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(".writing.npy")
        np.save(temporary, np.concatenate(parts))
        temporary.rename(cache)
    tokens: np.ndarray = np.load(cache, mmap_mode="r", allow_pickle=False)
    return tokens


def _tokenise(path: Path, tokeniser: Tokeniser) -> np.ndarray:
    tail, parts = b"", []
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            tail += piece
            tokens, consumed = tokeniser.encode_piece(tail, final=False)
            parts.append(tokens)
            tail = tail[consumed:]
    parts.append(tokeniser.encode_piece(tail, final=True)[0])
    tokens = np.concatenate(parts)
    if not len(tokens):
        raise ConfigError(f"training text {path} is empty; it needs at least one byte")
    return tokens


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

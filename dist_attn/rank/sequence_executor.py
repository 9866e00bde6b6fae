"""A text encoder on this rank's device: reads the sequences in its slices of blocks, without the other ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, final

import numpy as np
import torch

from dist_attn.errors import EngineError
from dist_attn.models import TextEncoder
from dist_attn.ops import FiniteCheck, Watch, watching
from dist_attn.rank.sequences import read_sequences
from dist_attn.rank_link.rows import sequence_length
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import DecodeOp, GuardCounts, OpenOp, PrefillOp, RowPieces, SavedState

__all__ = ["SequenceExecutor"]


@dataclass
class _Reading:
    """A session: the rows that it asks for and how far it has come."""

    rows: RowSpec
    position: int = 0


@final
class SequenceExecutor:
    """The sessions of this rank. A sequence is read whole, by one rank, so nothing is kept between blocks."""

    end_token: int | None = None
    state_bytes: int | None = 0
    pauses = 0
    manifest: Manifest | None = None

    def __init__(self, model: TextEncoder, rank: int, *, name: str, finite: FiniteCheck | None = None) -> None:
        self.model = name
        self.hidden_size = model.config.encoder.hidden_size
        self.vocab_size = model.config.vocab_size
        self.text_tokens: int | None = model.config.text_tokens
        self._encoder = model
        self._device = model.embedding.weight.device
        self._rank = rank
        self._sessions: dict[int, _Reading] = {}
        self._watch = Watch(finite)
        with torch.inference_mode():
            model(torch.zeros(1, 8, dtype=torch.int64, device=self._device)[:, : model.config.max_tokens])

    def open(self, op: OpenOp, state: bytes = b"") -> None:
        """Begin an encoding, or go on with one; there is no state but the place in the text.

        Raises: EngineError for a completion.
        """
        if op.rows is None:
            raise EngineError(f"session {op.session} wants text from {self.model!r}, which makes vectors only")
        self._sessions[op.session] = _Reading(op.rows, op.restore.position if op.restore else 0)

    def save(self, session: int, snapshot: bool = False) -> tuple[SavedState, bytes]:
        """The place in the text."""
        return SavedState(session, self._known(session).position, 0, 0), b""

    @torch.inference_mode()
    def prefill(self, op: PrefillOp, pause: Callable[[], None] | None = None) -> RowPieces | None:
        """Read the sequences in this rank's slice of a block; nothing decodes here, so `pause` is never called.

        Raises: EngineError for a block that does not follow the one before, or a slice that begins inside a sequence.
        """
        session = self._known(op.session)
        if op.start != session.position:
            raise EngineError(f"a block of session {op.session} starts at {op.start}; due is {session.position}")
        start = op.start + sum(op.lengths[: self._rank])
        size = sequence_length(session.rows, self._encoder.config.text_tokens)
        if start % size and op.lengths[self._rank]:
            raise EngineError(f"a slice of session {op.session} starts at {start}, inside a sequence of {size} tokens")
        session.position += sum(op.lengths)
        tokens_L = torch.from_numpy(np.frombuffer(op.tokens, dtype="<i4").astype(np.int64)).to(self._device)
        if not len(tokens_L):
            return None
        with watching(self._watch):
            return read_sequences(self._encoder, tokens_L, start, op.session, session.rows)

    def decode(self, op: DecodeOp) -> NoReturn:
        """Never called: completions are refused when they are opened.

        Raises: EngineError.
        """
        raise EngineError(f"{self.model!r} makes vectors and draws no tokens")

    def close(self, session: int) -> None:
        """Forget the session; an unknown one is ignored."""
        self._sessions.pop(session, None)

    def take_guards(self) -> GuardCounts | None:
        """The denominators since this was asked last; None where there were none."""
        watch = self._watch
        if not watch.denominators:
            return None
        counts = GuardCounts(watch.denominators, [list(layer) for layer in watch.guarded])
        watch.clear()
        return counts

    def shut_down(self) -> None:
        """Nothing to leave: these ranks exchange nothing."""

    def _known(self, session: int) -> _Reading:
        if session not in self._sessions:
            raise EngineError(f"session {session} is not open on rank {self._rank}; an OpenOp must come first")
        return self._sessions[session]

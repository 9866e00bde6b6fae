"""The model on this rank's device: opens, prefills, decodes and closes sessions as the steps say."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, final

import numpy as np
import torch

from dist_attn.checkpoints import kind_of_model, load_model, load_text_encoder
from dist_attn.comm import Communicator, open_communicator
from dist_attn.control.guard_tally import GuardTally
from dist_attn.control.heartbeat import Pulse
from dist_attn.engine.decode_slots import DecodeSlots
from dist_attn.engine.rank_settings import RankSettings
from dist_attn.engine.row_pieces import reduce_to_pieces
from dist_attn.engine.sequence_executor import SequenceExecutor
from dist_attn.engine.state_bytes import read_state, state_size, write_state
from dist_attn.errors import EngineError
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel, ModelState
from dist_attn.models.blocks import Block
from dist_attn.ops import FiniteCheck, LocalSequenceOps, SequenceOps, Watch, watching
from dist_attn.ops.finite import checked
from dist_attn.sharded import CacheKept, ShardedSequenceOps
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser
from dist_attn.wire.messages import (
    DecodeOp,
    Drawn,
    GuardCounts,
    OpenOp,
    PrefillOp,
    RowPieces,
    RowSpec,
    SamplingSpec,
    SavedState,
    SessionFault,
)

__all__ = ["ModelExecutor", "open_executor"]


@dataclass
class _Prefilling:
    """A session whose input is not complete; the state is equal on all ranks but for the keys of an encoding."""

    state: ModelState
    rows: RowSpec | None
    sampling: SamplingSpec | None
    position: int = 0


def open_executor(settings: RankSettings, pulse: Pulse) -> "ModelExecutor | SequenceExecutor":
    """Join the other ranks and load the model folder of `settings` onto this rank's device.

    Ranks that read sequences for themselves have nothing to exchange and do not join.

    Raises: ModelFolderError for a folder that is not a model, or not one that can be served; CommError if the ranks do
        not come together.
    """
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS") or 1)))
    torch.set_flush_denormal(True)  # for as long as this process lives, as `denormals_flushed` does elsewhere
    device = torch.device("cpu")
    if settings.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    folder = resolve_model_folder(settings.model)
    finite = FiniteCheck(settings.rank) if settings.check_finite else None
    if kind_of_model(folder) == "text_encoder":
        encoder = load_text_encoder(folder).to(device)
        for block in encoder.encoder.blocks:
            block.register_forward_hook(lambda *_: pulse.advance())
        return SequenceExecutor(encoder, settings.rank, name=folder.name, finite=finite)
    backend = settings.backend if settings.ranks > 1 else "local"
    comm = open_communicator(backend, timeout_s=settings.exchange_deadline_s, device=device)
    model = load_model(folder).to(device)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: pulse.advance())
    return ModelExecutor(model, comm, name=folder.name, end_token=_end_token(folder), finite=finite)


def _end_token(folder: Path) -> int | None:
    """The model's end token; a folder without a tokeniser has none, and completions end by their length."""
    return load_tokeniser(folder).end_token if (folder / "tokenizer.json").is_file() else None


@final
class ModelExecutor:
    """The sessions of this rank. Memory: one state per session; hidden states live no longer than their operation."""

    def __init__(
        self,
        model: LanguageModel,
        comm: Communicator,
        *,
        name: str,
        end_token: int | None,
        finite: FiniteCheck | None = None,
    ) -> None:
        self.model = name
        self.hidden_size = model.config.hidden_size
        self.vocab_size = model.config.vocab_size
        self.end_token = end_token
        self.text_tokens: int | None = None
        self._language_model = model
        self._device = model.embedding.weight.device
        self._comm = comm
        self._prefilling: dict[int, _Prefilling] = {}
        self._decoding = DecodeSlots(model)
        # Decoding goes between the layers of prefill: neither may find where the other one looks.
        self._watch = Watch(finite)
        self._decode_watch = Watch(None if finite is None else replace(finite))
        self._pause: Callable[[], None] | None = None
        self.pauses = 0
        for block in cast(list[Block], list(model.blocks)):
            for part in (block.mixer, block):
                part.register_forward_hook(lambda *_: self._let_in())
                self.pauses += 1
        self.state_bytes: int | None = None
        self._warm_up()

    @torch.inference_mode()
    def open(self, op: OpenOp, state: bytes = b"") -> None:
        """Begin a session with the empty state, or go on from the bytes of a saved one."""
        empty, restore = self._language_model.initial_state(1), op.restore
        if restore is None:
            self._prefilling[op.session] = _Prefilling(empty, op.rows, op.sampling)
        elif restore.draws and op.sampling is not None:
            restored = read_state(state, empty)
            self._decoding.take_in(op.session, restored, op.sampling, draws=restore.draws, counts=op.counts)
        else:
            restored = read_state(state, empty)
            self._prefilling[op.session] = _Prefilling(restored, op.rows, op.sampling, restore.position)

    @torch.inference_mode()
    def save(self, session: int) -> tuple[SavedState, bytes]:
        """The session's state as it is now."""
        if session in self._decoding:
            state, draws = self._decoding.state_of(session)
        else:
            known = self._known(session)
            state, draws = known.state, 0
        data = write_state(state)
        return SavedState(session, state.position, draws, len(data)), data

    @torch.inference_mode()
    def prefill(self, op: PrefillOp, pause: Callable[[], None] | None = None) -> RowPieces | None:
        """Feed this rank's slice of a block; the pieces of rows in it, for an encoding.

        `pause` is called `pauses` times, after each mixer and each layer: it may decode, and nothing else.

        Raises: EngineError for a block that does not follow the one before, CommError when another rank is lost,
            NotFiniteError where that is looked for.
        """
        session = self._known(op.session)
        if op.start != session.position:
            raise EngineError(f"a block of session {op.session} starts at {op.start}; due is {session.position}")
        ops: SequenceOps = LocalSequenceOps()
        start, length = 0, op.lengths[self._comm.rank]
        if self._comm.size > 1:
            layout = SequenceLayout.from_lengths(op.lengths)
            # A completion is decoded by one rank, which needs all keys that there are; an encoding never is.
            cache: CacheKept = "spread" if session.sampling is None else "whole"
            ops = ShardedSequenceOps(self._comm, layout, cache=cache)
            start = layout.range(self._comm.rank)[0]
        tokens_L = torch.from_numpy(np.frombuffer(op.tokens, dtype="<i4").astype(np.int64))
        if len(tokens_L) != length:
            raise EngineError(f"{len(tokens_L)} tokens of session {op.session} came; this rank's slice has {length}")
        if self._watch.finite is not None:
            self._watch.finite.first_tokens = (op.start + start,)
            ops = checked(ops)
        self._pause = pause
        with watching(self._watch):
            h_BLD, session.state = self._language_model.hidden(tokens_L[None].to(self._device), ops, session.state)
        self._pause = None
        session.position += sum(op.lengths)
        if session.rows is None or not length:
            return None
        return reduce_to_pieces(h_BLD[0], op.start + start, op.session, session.rows)

    @torch.inference_mode()
    def decode(self, op: DecodeOp) -> list[Drawn | SessionFault]:
        """Draw one token for each session; those that come for the first time leave prefill for good."""
        for entry in op.entries:
            if entry.session not in self._decoding:
                session = self._known(entry.session)
                if session.sampling is None or entry.token is None:
                    raise EngineError(f"session {entry.session} cannot decode: it needs sampling and a first token")
                del self._prefilling[entry.session]
                self._decoding.take_in(entry.session, session.state, session.sampling)
        with watching(self._decode_watch):
            return self._decoding.draw(op.entries)

    def _let_in(self) -> None:
        """Between two parts of the model: let others work, who must not be interrupted themselves."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause()
            self._pause = pause

    @torch.inference_mode()
    def close(self, session: int) -> None:
        """Drop the session's state; an unknown session is ignored."""
        self._prefilling.pop(session, None)
        self._decoding.forget(session)

    def take_guards(self) -> GuardCounts | None:
        """The denominators since this was asked last; None where there were none."""
        tally = GuardTally()
        for watch in (self._watch, self._decode_watch):
            tally.add(GuardCounts(watch.denominators, [list(layer) for layer in watch.guarded]))
            watch.clear()
        return tally.counts()

    def shut_down(self) -> None:
        """Leave the group."""
        self._comm.close()

    def _known(self, session: int) -> _Prefilling:
        if session not in self._prefilling:
            raise EngineError(f"session {session} is not open on rank {self._comm.rank}; an OpenOp must come first")
        return self._prefilling[session]

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run a few tokens, so that a model which cannot be sharded is refused before the hello."""
        lengths = [8] * self._comm.size
        ops: SequenceOps = LocalSequenceOps()
        if self._comm.size > 1:
            ops = ShardedSequenceOps(self._comm, SequenceLayout.from_lengths(lengths))
        self._language_model.hidden(torch.zeros(1, 8, dtype=torch.int64, device=self._device), ops)
        self.state_bytes = state_size(self._language_model)

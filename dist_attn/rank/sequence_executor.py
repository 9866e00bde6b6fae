"""A text encoder on this rank's device: reads the sequences in its slices of blocks, without the other ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray

from dist_attn.devices import present_compute
from dist_attn.errors import CommError, EngineError, InputError, NotFiniteError
from dist_attn.model_config.figures import tokens_at_once
from dist_attn.models import TextEncoder
from dist_attn.ops import FiniteCheck, LocalSequenceOps, Watch, current_watch, watching
from dist_attn.ops.device import send
from dist_attn.ops.finite import checked
from dist_attn.ops.trial import end_trials
from dist_attn.rank.row_pieces import tokens_of
from dist_attn.rank_link.rows import piece_edges, sequence_length
from dist_attn.text.cuts import marked_ends
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import (
    DecodeOp,
    GuardCounts,
    LoadedModel,
    OpenOp,
    PrefillOp,
    RowPieces,
    SavedState,
    SaveOp,
)
from dist_attn.wire.specs import MODEL_POOLING

BATCH_TOKENS = 1 << 14
_WHOLE = RowSpec("document", pooling=MODEL_POOLING)


@dataclass
class _Reading:
    """A request: the rows that it asks for and how far it has come."""

    rows: RowSpec
    position: int = 0


@final
class SequenceExecutor:
    """The requests of this rank. A sequence is read whole, by one rank, so nothing is kept between blocks."""

    def __init__(
        self,
        model: TextEncoder,
        rank: int,
        *,
        name: str,
        finite: FiniteCheck | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        self._encoder = model
        self._device = model.embedding.weight.device
        self.loaded = LoadedModel(
            name,
            model.config.encoder.hidden_size,
            model.config.vocab_size,
            text_tokens=model.config.text_tokens,
            state_bytes=0,
            backend="local",
            device=f"{self._device}, {present_compute(self._device).precision}",
            writes=False,
            chunk_tokens=chunk_tokens,
        )
        self._rank = rank
        self._requests: dict[int, _Reading] = {}
        self._ahead: dict[int, RowPieces] = {}  # of requests that were read before their turn
        self._watch = Watch(finite)
        self.fatal = fatal_on(self._device)
        self._refused: set[int] = set()
        packs = self._warm_up()
        self._packs = packs and finite is None

    @property
    def exchanges(self) -> int:
        """None: a sequence is read by one rank."""
        return 0

    def end_trials(self) -> list[str]:
        """End this rank's trials of kernels; what they came to."""
        return end_trials()

    def shares(self, op: OpenOp | PrefillOp | SaveOp) -> bool:
        """Never."""
        return False

    def refuse(self, request: int) -> None:
        """Pass over what follows of a request, until it is closed."""
        self.close(request)
        self._refused.add(request)

    def open(self, op: OpenOp, state: bytes = b"") -> None:
        """Begin an encoding, or go on with one; there is no state but the place in the text.

        Raises: EngineError for a completion.
        """
        if op.rows is None:
            raise EngineError(f"request {op.request} wants text from {self.loaded.name!r}, which makes vectors only")
        self._requests[op.request] = _Reading(op.rows, op.restore.position if op.restore else 0)

    def save(self, request: int, snapshot: bool = False) -> tuple[SavedState, bytes] | None:
        """The place in the text; None for a refused request."""
        if request in self._refused:
            return None
        return SavedState(request, self._known(request).position, 0, 0), b""

    @torch.inference_mode()
    def read_ahead(self, ops: Sequence[PrefillOp]) -> None:
        """Read texts of one sequence each together, whose blocks are the next to come; `prefill` then gives their rows.

        The last bits of a row may depend on which texts come in the same step. Nothing is added up from them: a text
        has one row, or a row for each token, all of the same step, and rows that were sent are not sent again.
        """
        short = {op.request: op for op in reversed(ops) if self._is_short(op)}
        if len(short) < 2 or not self._packs:
            return
        with watching(self._watch):
            for batch in batches_of(list(short.values())):
                specs = [self._requests[op.request].rows for op in batch]
                own = vectors_together(self._encoder, [tokens_of(op) for op in batch], specs)
                for op, spec, vectors_ND in zip(batch, specs, own, strict=True):
                    start, length = self._start(op), op.lengths[self._rank]
                    starts = range(start, start + length, 1 if spec.granularity == "token" else length)
                    self._ahead[op.request] = row_pieces(vectors_ND, starts, start + length, op.request)

    @torch.inference_mode()
    def prefill(self, op: PrefillOp, pause: Callable[[], None] | None = None) -> RowPieces | None:
        """Read the sequences in this rank's slice of a block; nothing decodes here, so `pause` is never called.

        Raises: EngineError for a block that does not follow the one before, or a slice that begins inside a sequence.
        """
        if op.request in self._refused:
            return None
        request = self._known(op.request)
        if op.start != request.position:
            raise EngineError(f"a block of request {op.request} starts at {op.start}; due is {request.position}")
        start, size = self._start(op), self._size(request)
        if start % size and op.lengths[self._rank]:
            raise EngineError(f"a slice of request {op.request} starts at {start}, inside a sequence of {size} tokens")
        request.position += sum(op.lengths)
        ahead = self._ahead.pop(op.request, None)
        if ahead is not None or not op.lengths[self._rank]:
            return ahead
        ends = marked_ends(np.frombuffer(op.tokens, dtype="<i4"), start).tolist()
        with watching(self._watch):
            return read_sequences(self._encoder, tokens_of(op), start, op.request, request.rows, ends)

    def decode(self, op: DecodeOp) -> NoReturn:
        """Never called: completions are refused when they are opened.

        Raises: EngineError.
        """
        raise EngineError(f"{self.loaded.name!r} makes vectors and draws no tokens")

    def close(self, request: int) -> None:
        """Forget the request; an unknown one is ignored."""
        self._requests.pop(request, None)
        self._ahead.pop(request, None)
        self._refused.discard(request)

    def finish_step(self) -> None:
        """Nothing to wait for: these ranks exchange nothing."""

    def take_guards(self) -> GuardCounts | None:
        """The denominators since this was asked last; None where there were none."""
        counts = take_counts(self._watch)
        return counts if counts.denominators else None

    def shut_down(self) -> None:
        """Nothing to leave: these ranks exchange nothing."""

    def _start(self, op: PrefillOp) -> int:
        """The first token of this rank's slice."""
        return op.start + sum(op.lengths[: self._rank])

    def _size(self, request: _Reading) -> int:
        return sequence_length(request.rows, self._encoder.config.text_tokens)

    def _is_short(self, op: PrefillOp) -> bool:
        """Return whether the block is the request's next, and this rank's slice one sequence."""
        request = self._requests.get(op.request)
        if request is None or op.start != request.position or request.rows.marked:
            return False
        return self._start(op) % self._size(request) == 0 and 0 < op.lengths[self._rank] <= self._size(request)

    @torch.inference_mode()
    def _warm_up(self) -> bool:
        """Read texts alone, side by side and packed, as requests will be; whether they can be read together.

        On a GPU long ones: kernels are compiled, measured and tried here, and not in a request.
        """
        model = self._encoder
        length = min(tokens_at_once(self._device.type, on_cpu=6), model.config.text_tokens)
        text_BT = torch.zeros(2, length, dtype=torch.int64, device=self._device)
        model.encode(text_BT[:1])
        model.encode(text_BT)
        try:
            model.hidden_together([*text_BT])
        except InputError:  # a mixer that takes no packed documents
            return False
        return True

    def _known(self, request: int) -> _Reading:
        if request not in self._requests:
            raise EngineError(f"request {request} is not open on rank {self._rank}; an OpenOp must come first")
        return self._requests[request]


def read_sequences(
    model: TextEncoder, tokens_L: torch.Tensor, start: int, request: int, spec: RowSpec, ends: Sequence[int] = ()
) -> RowPieces:
    """The rows in tokens [start, start + L): one per sequence, or one per token of the text.

    `start` is a multiple of the sequence's length; only the end of the text makes a shorter one. Marked rows end at
    `ends`: each is a sequence, or as many as the multiples of the model's length cut it into, weighted by their tokens.
    """
    length = len(tokens_L)
    size = sequence_length(spec, model.config.text_tokens)
    if spec.marked:
        return _read_marked(model, tokens_L, request, piece_edges(start, start + length, spec, ends, size), ends)
    whole = length - length % size
    batches = [*tokens_L[:whole].reshape(-1, size).split(max(1, BATCH_TOKENS // size)), tokens_L[whole:][None]]
    read, at = [], start
    for batch_BT in batches:
        if batch_BT.numel():
            starts = range(at, at + batch_BT.numel(), batch_BT.shape[1])
            read.append(_rows(model, batch_BT, starts, spec))
            at = starts.stop
    vectors_ND = torch.cat(read)
    step = 1 if spec.granularity == "token" else size
    return row_pieces(vectors_ND, range(start, start + length, step), start + length, request)


def vectors_together(
    model: TextEncoder, texts: Sequence[torch.Tensor], specs: Sequence[RowSpec]
) -> tuple[torch.Tensor, ...]:
    """The rows [N, D], on the CPU, of texts that are one sequence each, read as `TextEncoder.hidden_together` does."""
    rows = [_vectors(model, *read) for read in zip(model.hidden_together(texts), specs, strict=True)]
    # All at once: the host waits for the device whenever it takes rows.
    own: tuple[torch.Tensor, ...] = torch.cat(rows).to("cpu").split([len(vectors_ND) for vectors_ND in rows])
    return own


def row_pieces(vectors_ND: torch.Tensor, starts: range, stop: int, request: int) -> RowPieces:
    """The pieces of whole rows that begin at these tokens, the last one ending at `stop`."""
    data = vectors_ND.to(device="cpu", dtype=torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes()
    return RowPieces(request, list(starts), [*starts[1:], stop], data)


def batches_of(ops: list[PrefillOp]) -> Iterator[list[PrefillOp]]:
    """In order, BATCH_TOKENS of text at most together."""
    batch: list[PrefillOp] = []
    for op in ops:
        if batch and sum(len(one.tokens) for one in [*batch, op]) > 4 * BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(op)
    yield batch


def _read_marked(
    model: TextEncoder, tokens_L: torch.Tensor, request: int, edges_N: NDArray[np.int64], ends: Sequence[int]
) -> RowPieces:
    """The pieces between edges as sequences, each vector times its tokens; those of one length are read at once."""
    sizes_N, start = np.diff(edges_N), int(edges_N[0])
    read, order = [], []
    for size in np.unique(sizes_N).tolist():
        places = np.flatnonzero(sizes_N == size)
        for some in np.array_split(places, -(-len(places) * size // BATCH_TOKENS)):
            begins = torch.from_numpy(edges_N[some] - start)
            text_BT = tokens_L[begins[:, None] + torch.arange(size, device="cpu")]
            pooled_BD = _rows(model, send(text_BT, model.embedding.weight.device), edges_N[some].tolist(), _WHOLE)
            read.append(pooled_BD.to(torch.float32) * size)
            order.append(some)
    vectors_ND = torch.cat(read).to("cpu")[torch.from_numpy(np.concatenate(order).argsort())]
    data = vectors_ND.numpy().astype("<f4", copy=False).tobytes()
    return RowPieces(request, edges_N[:-1].tolist(), edges_N[1:].tolist(), data, list(ends))


def _rows(model: TextEncoder, text_BT: torch.Tensor, starts: Sequence[int], spec: RowSpec) -> torch.Tensor:
    """The rows of texts that begin at these tokens."""
    watch, ops = current_watch(), LocalSequenceOps()
    finite = None if watch is None else watch.finite
    if finite is not None:
        finite.first_tokens = tuple(start - len(model.config.prefix) for start in starts)
    h_BLD = model.hidden(model.frame(text_BT), ops if finite is None else checked(ops))
    return _vectors(model, h_BLD, spec)


def _vectors(model: TextEncoder, h_BLD: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    """Of framed sequences: a vector each, or those of the tokens of text."""
    if spec.granularity != "token":
        return model.pool(h_BLD)
    return h_BLD[:, len(model.config.prefix) : h_BLD.shape[1] - len(model.config.suffix)].flatten(0, 1)


def fatal_on(device: torch.device) -> tuple[type[Exception], ...]:
    """Errors behind which a process cannot go on: of exchanges, of memory, of a check that asks for it, of a device."""
    of_device = () if device.type == "cpu" else (RuntimeError,)
    return (CommError, MemoryError, NotFiniteError, *of_device)


def take_counts(watch: Watch) -> GuardCounts:
    """The denominators that were watched since this was asked last."""
    counts = GuardCounts(watch.denominators, [list(layer) for layer in watch.guarded])
    watch.clear()
    return counts

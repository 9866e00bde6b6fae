"""The model on this rank's device: opens, prefills, decodes and closes requests as the steps say."""

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from msgspec import structs

from dist_attn.checkpoints import (
    fuses_on_cpus,
    kind_of_model,
    load_causal_model,
    load_model,
    load_stream_encoder,
    load_text_encoder,
)
from dist_attn.comm import Communicator, Rendezvous, open_communicator
from dist_attn.control.preflight import check_weights_fit
from dist_attn.devices import Compute, choose_compute, present_compute
from dist_attn.errors import EngineError, InputError, StateMismatchError, WireError
from dist_attn.generation import StateShapes, computation_of, identity_of
from dist_attn.generation.captured_step import SLOT_BYTES
from dist_attn.host_limits import given_threads
from dist_attn.layout import SequenceLayout
from dist_attn.model_config.figures import SLOTS, tokens_of_block
from dist_attn.models import CausalModel, ModelState, StreamEncoder, StreamingModel, hold_weights_as
from dist_attn.ops import FiniteCheck, LocalSequenceOps, SequenceOps, Watch, watching
from dist_attn.ops.device import send
from dist_attn.ops.finite import checked
from dist_attn.ops.trial import found_right
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.rank.layers_apart import LayersApart
from dist_attn.rank.row_pieces import reduce_to_pieces, score_pieces, tokens_of
from dist_attn.rank.sequence_executor import SequenceExecutor, batches_of, fatal_on, take_counts
from dist_attn.rank.state_bytes import read_state, snapshot_bytes, state_of_snapshot, write_state
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.sharded import CacheKept, ShardedSequenceOps
from dist_attn.sharded.trials import end_trials_together
from dist_attn.shipped import origin, resolve_model_folder
from dist_attn.text import end_tokens, fitted, load_tokeniser
from dist_attn.text.cuts import marked_ends
from dist_attn.text.grammars import Grammars
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import (
    DecodeEntry,
    DecodeOp,
    Drawn,
    GuardCounts,
    LoadedModel,
    OpenOp,
    PrefillOp,
    RequestFault,
    RowPieces,
    SavedState,
    SaveOp,
)
from dist_attn_api.errors import Code

MIB = 1 << 20


@dataclass
class _Prefilling:
    """A request whose input is not complete; the state is equal on all ranks but for the keys of an encoding."""

    state: ModelState
    rows: RowSpec | None
    sampling: SamplingSpec | None
    position: int = 0
    from_logits: bool = False
    logits_V: torch.Tensor | None = None  # after its last token, as they were stored
    last_D: torch.Tensor | None = None  # or that token's hidden state, on the rank that has read it
    last_rank: int | None = None  # this rank, where its logits are kept


def open_executor(settings: RankSettings, pulse: Pulse) -> "ModelExecutor | SequenceExecutor":
    """Join the other ranks and load the model folder of `settings` onto this rank's device.

    Ranks that read sequences for themselves have nothing to exchange and do not join.

    Raises: ModelFolderError for a folder that is not a model, or not one that can be served; ConfigError for weights
        that its kind of model cannot hold so and for a device that is not there, InputError for weights that are not
        finite; CommError if the ranks do not come together.
    """
    torch.set_num_threads(given_threads(os.environ) or 1)
    torch.set_flush_denormal(True)  # for as long as this process lives, as `denormals_flushed` does elsewhere
    check_weights_fit(resolve_model_folder(settings.model), settings.weights)
    compute = choose_compute(settings.device, settings.dtype, fused=fuses_on_cpus(settings.model))
    executor = _load(settings, compute, pulse)
    for outcome in executor.end_trials() if compute.device.type == "cuda" else ():
        _tell(settings, outcome)
    return executor


def _load(settings: RankSettings, compute: Compute, pulse: Pulse) -> "ModelExecutor | SequenceExecutor":
    folder = resolve_model_folder(settings.model)
    downloaded = origin(folder) == "downloaded"
    if compute.dtype == torch.bfloat16 and not downloaded:
        compute.autocast().__enter__()  # for as long as this process lives
    finite = FiniteCheck(settings.rank) if settings.check_finite else None
    kind = kind_of_model(folder)
    chunk_tokens = settings.chunk_tokens or tokens_of_block(compute.device.type, writes=not kind.endswith("_encoder"))
    if kind == "text_encoder":
        (encoder := load_text_encoder(folder).to(compute.device)).pack_weights()
        for part in encoder.parts:
            part.register_forward_hook(lambda *_: pulse.advance())
        _tell(settings, compute.sentence(weights=settings.weights))
        return SequenceExecutor(encoder, settings.rank, name=folder.name, finite=finite, chunk_tokens=chunk_tokens)
    backend = settings.backend if settings.ranks > 1 else "local"
    place = settings.rendezvous
    rendezvous = Rendezvous(place, settings.start_deadline_s, settings.listener) if place else None
    comm = open_communicator(backend, settings.exchange_deadline_s, compute.device, rendezvous)
    # C kernels are compiled for this sentence, and not within the first request.
    _tell(settings, compute.sentence(comm, settings.weights))
    model: StreamingModel
    if kind == "stream_encoder":
        model = load_stream_encoder(folder).to(compute.device)
        model.pack_weights()
    elif downloaded:
        over = comm if settings.weights_over_ranks else None
        model = load_causal_model(folder, weights=settings.weights, dtype=compute.dtype, over=over).to(compute.device)
    else:
        model = load_model(folder).to(compute.device)
        report = hold_weights_as(model, settings.weights)
        if settings.weights != "float32":
            _tell(settings, report.sentence())
    for part in model.parts:
        part.register_forward_hook(lambda *_: pulse.advance())
    computed = computation_of(
        model, chunk_tokens=chunk_tokens * settings.ranks, decode_slots=SLOTS, ranks=settings.ranks
    )
    manifest = Manifest(identity_of(model, folder), computed)
    ends = _end_tokens(folder, model)
    executor = ModelExecutor(
        model,
        comm,
        name=folder.name,
        end_tokens=ends,
        finite=finite,
        manifest=manifest,
        slot_bytes=settings.state_bytes,
    )
    executor.take_grammars(Grammars(lambda: fitted(load_tokeniser(folder), folder, model.vocab_size), ends))
    return executor


def _tell(settings: RankSettings, sentence: str) -> None:
    """One rank's words for the log, which gets the output of all of them."""
    if settings.rank == 0:
        print(f"rank 0 of {Path(settings.model).name}: {sentence}", file=sys.stderr, flush=True)


def _end_tokens(folder: Path, model: StreamingModel) -> tuple[int, ...]:
    """The tokens that end a text; a folder without a tokeniser has none, and completions end by their length."""
    if not isinstance(model, CausalModel) or not (folder / "tokenizer.json").is_file():
        return ()
    return end_tokens(load_tokeniser(folder), folder, model.vocab_size)


@final
class ModelExecutor:
    """The requests of this rank.

    Memory: one state per request, and where steps are captured slots of `slot_bytes` at most; hidden states live no
    longer than their step, but for that of a session's last token.
    """

    def __init__(
        self,
        model: StreamingModel,
        comm: Communicator,
        *,
        name: str,
        end_tokens: Collection[int] = (),
        finite: FiniteCheck | None = None,
        manifest: Manifest | None = None,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._model = model
        self._device = model.device
        self._comm = comm
        self._prefilling: dict[int, _Prefilling] = {}
        self._ahead: dict[int, torch.Tensor] = {}  # hidden states of texts that were read before their turn
        self._refused: set[int] = set()  # requests whose stored state is none: what follows of them is passed over
        # Decoding goes between the layers of prefill: neither may find where the other one looks.
        self._watch = Watch(finite)
        self._decode_watch = Watch(None if finite is None else replace(finite))
        self._pause: Callable[[], None] | None = None
        self.fatal = fatal_on(self._device)
        for part in model.parts:
            part.register_forward_hook(lambda *_: self._let_in())
        self._warm_up()
        self._shapes = StateShapes.of(model)
        of_ranks = model.layers_of_ranks
        self._apart = None if of_ranks is None else LayersApart(comm, of_ranks, self._shapes)
        device = f"{self._device}, {present_compute(self._device).precision}"
        if self._apart is not None:
            held = sum(weight.nbytes for weight in model.parameters() if not weight.is_meta)
            device += f", {held / MIB:,.0f} MiB of the weights"
        self._decoding: DecodeSlots | None = None  # of a model that makes more than vectors
        if isinstance(model, CausalModel):
            self._decoding = DecodeSlots(model, end_tokens, most_bytes=slot_bytes, apart=self._apart)
        self.loaded = LoadedModel(
            name,
            model.hidden_size,
            model.vocab_size,
            tuple(end_tokens),
            state_bytes=self._shapes.num_bytes,
            manifest=manifest,
            token_bytes=self._shapes.token_bytes,
            pauses=len(model.parts),
            backend=comm.backend,
            device=device,
            writes=isinstance(model, CausalModel),
            positions=model.learned_positions,
            chunk_tokens=None if manifest is None else manifest.computed.chunk_tokens // comm.size,
        )

    @property
    def exchanges(self) -> int:
        """The number of exchanges with other ranks that this one has begun."""
        return self._comm.traffic.calls + self._comm.agreements.calls

    def take_grammars(self, grammars: Grammars) -> None:
        """Let answers follow grammars of the model's tokens."""
        if self._decoding is not None:
            self._decoding.grammars = grammars

    def end_trials(self) -> list[str]:
        """End the trials of all ranks; what they came to. Stored states tell what came out right."""
        outcomes, manifest = end_trials_together(self._comm), self.loaded.manifest
        if manifest is not None:
            computed = structs.replace(manifest.computed, kernels="; ".join(found_right()))
            self.loaded = structs.replace(self.loaded, manifest=Manifest(manifest.model, computed))
        return outcomes

    def shares(self, op: OpenOp | PrefillOp | SaveOp) -> bool:
        """Return whether all ranks take part: in a block, in decoding over all of them, in opening what they read."""
        if self._comm.size == 1:
            return False
        if isinstance(op, PrefillOp):
            return not self._is_short(op)
        return self._apart is not None or (isinstance(op, OpenOp) and not (op.restore and op.restore.draws))

    def refuse(self, request: int) -> None:
        """Pass over what follows of a request, until it is closed."""
        self.close(request)
        self._refused.add(request)

    @torch.inference_mode()
    def open(self, op: OpenOp, state: bytes = b"") -> RequestFault | None:
        """Begin a request with the empty state, or go on from the bytes of a saved one.

        A stored state that is none of this model's is a fault of the request: every rank sees the same bytes, and all
        pass over what follows until the request is closed.

        Raises: EngineError for a completion by a model that only makes vectors, WireError for a state, saved in case of
            a loss, that does not fit the model.
        """
        if self._decoding is None and op.rows is None:
            raise EngineError(f"request {op.request} wants text from {self.loaded.name!r}, which makes vectors only")
        restored, restore = self._model.initial_state(1), op.restore
        logits_V = None
        if restore is not None and restore.snapshot:
            try:
                restored, logits_V = state_of_snapshot(state, self._model, self.loaded.manifest, self._shapes)
            except (WireError, StateMismatchError) as error:
                self._refused.add(op.request)
                return RequestFault(op.request, str(error), Code.INVALID_STATE)
        elif restore is not None:
            restored = read_state(state, self._shapes)
        if self._decoding is not None and restore is not None and restore.draws and op.sampling is not None:
            drawn = memoryview(op.drawn).cast("i")
            self._decoding.take_in(
                op.request, restored, op.sampling, draws=restore.draws, counts=op.counts, drawn=drawn, logits_V=logits_V
            )
        else:
            position = 0 if restore is None else restore.position
            self._prefilling[op.request] = _Prefilling(
                restored, op.rows, op.sampling, position, op.from_logits, logits_V
            )
        return None

    @torch.inference_mode()
    def save(self, request: int, snapshot: bool = False) -> tuple[SavedState, bytes] | None:
        """The request's state as it is now and its bytes; None for a refused request, or where another rank sends it.

        With layers apart it is a call of all ranks for a request that decodes.

        Raises: EngineError for a request that is not open, or a state that cannot be stored.
        """
        if request in self._refused:
            return None
        if self._decoding is not None and request in self._decoding:
            state, draws, logits_V = self._decoding.state_of(request)
            whole = state if self._apart is None else self._apart.whole(state)
            if whole is None:
                return None
            state = whole
        else:
            known = self._known(request)
            state, draws, logits_V = known.state, 0, self._logits(known)
        data = snapshot_bytes(state, logits_V, self.loaded.manifest) if snapshot else write_state(state)
        return SavedState(request, state.position, draws, len(data), snapshot=snapshot), data

    def _logits(self, request: _Prefilling) -> torch.Tensor | None:
        """The logits after the request's last token, where this rank has them."""
        if request.last_D is not None and isinstance(self._model, CausalModel):
            request.logits_V = self._model.readout(request.last_D[None])[0].float().cpu()
            request.last_D = None
        return request.logits_V

    @torch.inference_mode()
    def read_ahead(self, ops: Sequence[PrefillOp]) -> None:
        """Read short texts of a stream encoder, of which this rank has all, together.

        The last bits of a row may depend on which texts come in the same step. These end with their only block, so that
        no state goes on from there, and longer texts are never read so: theirs have the same bits after a loss.
        """
        own = [op for op in ops if op.lengths[self._comm.rank] and op.request in self._prefilling]
        short = {op.request: op for op in own if self._is_short(op)}
        if len(short) < 2 or not isinstance(self._model, StreamEncoder) or self._watch.finite is not None:
            return
        # InputError: of a mixer that takes no packed documents; each is read in its turn.
        with contextlib.suppress(InputError), watching(self._watch):
            for batch in batches_of(list(short.values())):
                read = self._model.short_hidden([tokens_of(op) for op in batch])
                self._ahead |= {op.request: h_1LD for op, h_1LD in zip(batch, read, strict=True)}

    def _is_short(self, op: PrefillOp) -> bool:
        """Return whether the block is a whole text that one rank reads alone, without a word to the others."""
        total = sum(op.lengths)
        alone = isinstance(self._model, StreamEncoder) and total == max(op.lengths)
        return alone and op.start == 0 and 0 < total < self._model.grain

    @torch.inference_mode()
    def prefill(self, op: PrefillOp, pause: Callable[[], None] | None = None) -> RowPieces | None:
        """Feed this rank's slice of a block; the pieces of rows in it, for an encoding or a prompt that is scored.

        `pause` is called after each part of the model, `loaded.pauses` times, and not for a text that was read ahead:
        it may decode, and nothing else.

        Raises: EngineError for a block that does not follow the one before or tokens that are not this rank's slice,
            CommError when another rank is lost, NotFiniteError where that is looked for.
        """
        if op.request in self._refused:
            return None
        request = self._known(op.request)
        if op.start != request.position:
            raise EngineError(f"a block of request {op.request} starts at {op.start}; due is {request.position}")
        ops: SequenceOps = LocalSequenceOps()
        start, length = 0, op.lengths[self._comm.rank]
        if self._comm.size > 1 and not self._is_short(op):
            layout = SequenceLayout.from_lengths(op.lengths)
            # A rank that decodes, or is asked for the state, needs all keys that there are: with an encoding none does.
            needed = request.sampling is not None or request.from_logits
            cache: CacheKept = "whole" if needed else "spread"
            ops = ShardedSequenceOps(self._comm, layout, cache=cache)
            start = layout.range(self._comm.rank)[0]
        marked_L = np.frombuffer(op.tokens, dtype="<i4")
        tokens_L = tokens_of(op)
        if len(tokens_L) != length:
            raise EngineError(f"{len(tokens_L)} tokens of request {op.request} came; this rank's slice has {length}")
        if self._watch.finite is not None:
            self._watch.finite.first_tokens = (op.start + start,)
            ops = checked(ops)
        self._pause = pause
        try:
            with watching(self._watch):
                h_BLD = self._ahead.pop(op.request, None)
                if h_BLD is None:
                    h_BLD, request.state = self._model.hidden(tokens_L[None], ops, request.state)
        finally:
            self._pause = None
        request.position += sum(op.lengths)
        request.logits_V = None
        # A copy: a view would keep the hidden states of the whole block.
        reads_last = request.from_logits and length and not any(op.lengths[self._comm.rank + 1 :])
        request.last_D = h_BLD[0, -1].clone() if reads_last else None
        request.last_rank = max((rank for rank, n in enumerate(op.lengths) if n), default=None)
        if not length:
            return None
        if request.rows is not None:
            ends = marked_ends(marked_L, op.start + start).tolist()
            return reduce_to_pieces(h_BLD[0], op.start + start, op.request, request.rows, ends)
        count = None if request.sampling is None else request.sampling.prompt_logprobs
        if count is None or op.following is None or not isinstance(self._model, CausalModel):
            return None
        targets_L = send(torch.cat([tokens_L[1:], torch.tensor([op.following], device="cpu")]), self._device)
        return score_pieces(self._model.readout, h_BLD[0], targets_L, op.start + start, op.request, count)

    @torch.inference_mode()
    def decode(self, op: DecodeOp) -> list[Drawn | RequestFault]:
        """Draw one token for each request; those that come for the first time leave prefill for good.

        With layers apart it is a call of all ranks, and the last one answers.
        Raises: EngineError for a request that cannot decode, and of a model that makes vectors alone.
        """
        slots = self._decoding
        if slots is None:
            raise EngineError(f"{self.loaded.name!r} makes vectors and draws no tokens")
        entries = [entry for entry in op.entries if entry.request not in self._refused]
        faults: list[Drawn | RequestFault] = []
        for entry in entries:
            if entry.request not in slots:
                fault = self._begin_decoding(entry, slots)
                faults += [] if fault is None else [fault]
        with watching(self._decode_watch):
            drawn = slots.draw(entry for entry in entries if entry.request in slots)
        return faults + drawn if self._apart is None or self._apart.draws else []

    def _begin_decoding(self, entry: DecodeEntry, slots: DecodeSlots) -> RequestFault | None:
        request = self._known(entry.request)
        logits_V = self._logits(request)
        if self._apart is not None and request.from_logits and request.last_rank is not None:
            sent_1V = logits_V[None] if logits_V is not None else torch.empty(1, self.loaded.vocab_size, device="cpu")
            logits_V = self._apart.to_last(sent_1V, request.last_rank).reshape(-1)
        if request.sampling is None or (entry.token is None and not request.from_logits):
            raise EngineError(f"request {entry.request} cannot decode: it needs sampling and a first token")
        if request.from_logits and logits_V is None:
            self._refused.add(entry.request)
            text = "the stored state has no logits after its last token to draw from; feed at least one token"
            return RequestFault(entry.request, text, Code.INVALID_VALUE)
        del self._prefilling[entry.request]
        kept_V = logits_V if request.from_logits else None
        slots.take_in(entry.request, request.state, request.sampling, logits_V=kept_V)
        return None

    def _let_in(self) -> None:
        """Between two parts of the model: let others work, who must not be interrupted themselves."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause()
            self._pause = pause

    @torch.inference_mode()
    def close(self, request: int) -> None:
        """Drop the request's state; an unknown request is ignored."""
        self._prefilling.pop(request, None)
        self._ahead.pop(request, None)
        self._refused.discard(request)
        if self._decoding is not None:
            self._decoding.forget(request)

    def finish_step(self) -> None:
        """Wait for what the step's operations have exchanged.

        Raises: CommError where something of it failed, so that what was made of it is not answered.
        """
        self._comm.check_exchanges()

    def take_guards(self) -> GuardCounts | None:
        """The denominators since this was asked last; None where there were none."""
        self._watch.add(self._decode_watch)
        self._decode_watch.clear()
        counts = take_counts(self._watch)
        return counts if counts.denominators else None

    def shut_down(self) -> None:
        """Leave the group."""
        self._comm.close()

    def _known(self, request: int) -> _Prefilling:
        if request not in self._prefilling:
            raise EngineError(f"request {request} is not open on rank {self._comm.rank}; an OpenOp must come first")
        return self._prefilling[request]

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run a few tokens, so that a model which cannot be sharded is refused before the hello.

        On a GPU as many as a block has: kernels are compiled, measured and tried here, and not in a request.
        """
        writes = isinstance(self._model, CausalModel)
        length = max(tokens_of_block(self._device.type, writes=writes, on_cpu=8), self._model.grain)
        if (positions := self._model.learned_positions) is not None:
            length = max(1, min(length, positions // self._comm.size))
        lengths = [length] * self._comm.size
        ops: SequenceOps = LocalSequenceOps()
        if self._comm.size > 1:
            ops = ShardedSequenceOps(self._comm, SequenceLayout.from_lengths(lengths))
        text_1L = torch.zeros(1, length, dtype=torch.int64, device=self._device)
        self._model.hidden(text_1L, ops)
        if isinstance(self._model, StreamEncoder):
            # Short texts are read by one rank, alone and packed; an unfinished pair of blocks ends longer ones too.
            short_1L = text_1L[:, : self._model.grain - 1]
            self._model.hidden(short_1L)
            with contextlib.suppress(InputError):
                self._model.short_hidden([short_1L[0]] * 2)
        elif isinstance(self._model, CausalModel) and self._model.layers_of_ranks is None:
            self._model.step(text_1L[:, 0], self._model.initial_state(1))
        self.finish_step()

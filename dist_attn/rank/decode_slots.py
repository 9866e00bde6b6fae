"""Decoding many requests side by side, in batches of one fixed shape, so that a request's bits do not depend on others.

The states of a batch stay side by side from token to token; they are taken apart only when requests come or go. A
key-value cache is not copied for that: each request keeps its own, of whatever length. Where steps are captured it is:
into a slot whose size the request's length alone decides, so that what lies beside it changes no bit. Batches for which
there is no room at once take turns in the slots.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

import torch

from dist_attn.errors import EngineError, GrammarError
from dist_attn.generation import (
    CapturedStep,
    StepGraphs,
    StepMode,
    generator_for,
    sample,
    takes_captured_steps,
    token_logprobs,
)
from dist_attn.generation.captured_step import GROWS, SLOT_BYTES, slot_bytes
from dist_attn.mixers.softmax import SoftmaxState
from dist_attn.model_config.figures import SLOTS
from dist_attn.models import CausalModel, LanguageModel, ModelState
from dist_attn.ops import current_watch
from dist_attn.ops.processor import one_thread
from dist_attn.ops.softmax_attention import places_for
from dist_attn.ops.state import steps_in_place
from dist_attn.ops.whole_vectors import WholeVectors
from dist_attn.rank.layers_apart import FAULT, LayersApart
from dist_attn.text.grammars import FollowedGrammar, Grammars
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, Drawn, RequestFault
from dist_attn_api.errors import Code

WEIGHTS_OF_ONE_THREAD = 1 << 24
"""A step of a model of ours with fewer weights takes 2 to 5 ms of a core. A second thread saves a third of that, takes
as much from processes beside it, and makes steps three times as long where it waits for a core."""
KEPT_STEPS = 4
"""Captured steps that are kept for batches to come: to capture one takes longer than many tokens."""


@dataclass
class _Drawing:
    """One request that decodes here."""

    spec: SamplingSpec
    ends: Collection[int]  # the tokens that end its text
    generator: torch.Generator
    token: int = 0  # the one to feed next
    draws: int = 0
    logits_V: torch.Tensor | None = None  # those after the last token, where it draws from them; else it feeds first
    ended: bool = False  # it has drawn an end token from them, which is not fed
    counts: Counter[int] = field(default_factory=Counter)  # of drawn tokens that were fed; kept where penalties need it
    form: FollowedGrammar | None = None

    def fed(self) -> None:
        """Note that a drawn token was fed.

        Where it is fed, not where it is drawn: after a loss what counts is the token that was sent.
        """
        if self.spec.penalises:
            self.counts[self.token] += 1
        if self.form is not None:
            self.form.take(self.token)


@dataclass
class _Batch:
    requests: tuple[int, ...]
    state: ModelState  # of SLOTS sequences; with a captured step, in its buffers
    captured: CapturedStep | None = None


@final
class DecodeSlots:
    """The requests that this rank draws tokens for.

    `steps` says whether batches are decoded over buffers that stay, see `generation.takes_captured_steps`. `graphs` is
    where their graphs come from; a step that was captured serves any number of requests up to SLOTS, and what is kept
    for batches to come is given up with the last request. All slots together take `most_bytes` at most. With layers
    `apart` every rank decodes the same requests, and all but the last are told what was drawn: their `Drawn` have no
    probabilities.
    """

    def __init__(
        self,
        model: CausalModel,
        end_tokens: Collection[int] = (),
        *,
        steps: StepMode = "auto",
        graphs: StepGraphs | None = None,
        most_bytes: int = SLOT_BYTES,
        apart: LayersApart | None = None,
    ) -> None:
        self._model = model
        self.grammars: Grammars | None = None
        """The grammars of answers, of a model whose tokens are known."""
        self._layers_apart = apart
        self._end_tokens = end_tokens
        self._drawings: dict[int, _Drawing] = {}
        self._unbatched: dict[int, ModelState] = {}  # states that are in no batch
        self._batches: list[_Batch] = []
        device = model.device
        self._captures = takes_captured_steps("eager" if apart is not None else steps, device)
        self._graphs = StepGraphs(device) if graphs is None else graphs
        self._most_bytes = most_bytes
        self._free: list[CapturedStep] = []  # those of batches that are no more
        self._whole: WholeVectors | None = WholeVectors() if device.type == "cpu" else None
        few = isinstance(model, LanguageModel) and sum(p.numel() for p in model.parameters()) < WEIGHTS_OF_ONE_THREAD
        self._threads = one_thread if few and device.type == "cpu" else nullcontext

    @property
    def how(self) -> frozenset[str]:
        """In words, how the steps of the batches at hand are taken, and why."""
        if not self._captures:
            return frozenset({"operation by operation: captured steps were not asked for"})
        return frozenset(
            f"operation by operation: {GROWS}" if b.captured is None else b.captured.how for b in self._batches
        )

    @property
    def held_bytes(self) -> int:
        """The bytes of all slots, also of those that are kept for batches to come."""
        held = (batch.captured for batch in self._batches if batch.captured is not None)
        return sum(step.slot_bytes for step in (*held, *self._free))

    def __contains__(self, request: int) -> bool:
        return request in self._drawings

    def take_in(
        self,
        request: int,
        state: ModelState,
        spec: SamplingSpec,
        *,
        draws: int = 0,
        counts: Mapping[int, int] | None = None,
        drawn: Iterable[int] = (),
        logits_V: torch.Tensor | None = None,
    ) -> None:
        """A request whose prompt is prefilled but for its last token, or one that had `draws` tokens drawn before.

        `counts` are those of the drawn tokens that are in the state, `drawn` these tokens in order: all but the last
        one. With `logits_V`, those after the state's last token, the request draws from them and then feeds what it has
        drawn: all drawn ones are in it.
        """
        ends, generator = spec.ended_by(self._end_tokens), generator_for(spec, request, draws)
        drawing = _Drawing(spec, ends, generator, draws=draws, counts=Counter(counts or {}), logits_V=logits_V)
        if spec.grammar:
            drawing.form = FollowedGrammar(self.grammars, spec.grammar, drawn)
        self._drawings[request] = drawing
        self._unbatched[request] = state if self._layers_apart is None else self._layers_apart.own(state)

    def state_of(self, request: int) -> tuple[ModelState, int, torch.Tensor | None]:
        """The request's state, how many tokens were drawn, and the logits after its last one where they are kept.

        Where they are not, the last drawn token is not in the state yet.
        """
        drawing = self._drawings[request]
        if request in self._unbatched:
            return self._unbatched[request], drawing.draws, drawing.logits_V
        batch = next(batch for batch in self._batches if request in batch.requests)
        return batch.state.select(batch.requests.index(request)), drawing.draws, drawing.logits_V

    def forget(self, request: int) -> None:
        """Drop the request and its state; an unknown one is ignored."""
        if self._drawings.pop(request, None) is None:
            return
        self._unbatched.pop(request, None)
        for batch in self._batches:
            if request in batch.requests:
                self._dissolve(batch)
                break
        if not self._drawings:
            self._free.clear()  # states and graphs take memory that was not planned for

    def draw(self, entries: Iterable[DecodeEntry]) -> list[Drawn | RequestFault]:
        """Feed each request its token and draw the next one; those that draw from kept logits feed what they draw."""
        fed = []
        results: list[Drawn | RequestFault] = []
        for entry in entries:
            drawing = self._drawings[entry.request]
            if drawing.logits_V is not None:
                result = self._draw_kept(entry, drawing, drawing.logits_V)
                results += [] if result is None else [result]
                if isinstance(result, Drawn) and not drawing.ended:
                    fed.append(entry.request)
                continue
            drawing.token = drawing.token if entry.token is None else entry.token
            if drawing.draws:
                drawing.fed()
            fed.append(entry.request)
        new = self._arrange(fed)
        for batch in self._batches:
            results += self._draw_batch(batch)
        for requests in new:  # one after the other: a batch that has drawn may make room for the next
            self._batches.append(self._stack(requests))
            results += self._draw_batch(self._batches[-1])
        return results

    def _draw_kept(self, entry: DecodeEntry, drawing: _Drawing, logits_V: torch.Tensor) -> Drawn | RequestFault | None:
        """Draw from the logits after the request's last token; what it gave the first time is what will be fed."""
        if drawing.ended:
            return None
        (result,) = self._sample_each([(entry.request, drawing, logits_V)])
        if isinstance(result, Drawn):
            drawing.token = result.token if entry.token is None else entry.token
            drawing.ended = drawing.token in drawing.ends
            if drawing.ended:
                drawing.draws -= 1
            else:
                drawing.fed()
        return result

    def _draw_batch(self, batch: _Batch) -> list[Drawn | RequestFault]:
        drawings = [self._drawings[request] for request in batch.requests]
        tokens = [drawing.token for drawing in drawings] + [0] * (SLOTS - len(drawings))
        token_B = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        watch = current_watch()
        if watch is not None:
            watch.rows = len(drawings)
            if watch.finite is not None:
                watch.finite.first_tokens = tuple(batch.state.position_B.tolist())
        looked_at = watch is not None and watch.finite is not None  # also at the state before
        with self._threads(), self._whole or nullcontext():
            if batch.captured is not None:
                logits_BV = batch.captured.step(token_B)
                batch.state = batch.captured.state
            else:
                with nullcontext() if looked_at else steps_in_place():
                    logits_BV, batch.state = self._model.step(token_B, batch.state)
        if self._whole is not None and not self._whole.needed:
            self._whole = None  # it looks at every call of torch, which takes a microsecond
        if watch is not None:
            watch.rows = None
        logits_BV = logits_BV[: len(drawings)].float().cpu()
        due: list[tuple[int, _Drawing, torch.Tensor]] = []
        for request, drawing, logits_V in zip(batch.requests, drawings, logits_BV, strict=True):
            if drawing.logits_V is not None:
                drawing.logits_V = logits_V.clone()
            else:
                due.append((request, drawing, logits_V))
        results = self._sample_each(due)
        for (_, drawing, _), result in zip(due, results, strict=True):
            if isinstance(result, Drawn):
                drawing.token = result.token
        return results

    def _sample_each(self, due: list[tuple[int, _Drawing, torch.Tensor]]) -> list[Drawn | RequestFault]:
        """A token for each of them, here or on the rank that has their logits."""
        if self._layers_apart is None or not due:
            return [_draw(*each) for each in due]
        if self._layers_apart.draws:
            results = [_draw(*each) for each in due]
            self._layers_apart.tell([result.token if isinstance(result, Drawn) else FAULT for result in results])
            return results
        tokens = self._layers_apart.tell([FAULT] * len(due))
        for (_, drawing, _), token in zip(due, tokens, strict=True):
            drawing.draws += token != FAULT
        return [
            Drawn(request, token) if token != FAULT else RequestFault(request, "another rank could not draw")
            for (request, _, _), token in zip(due, tokens, strict=True)
        ]

    def _arrange(self, fed: list[int]) -> list[tuple[int, ...]]:
        """Leave full batches of these requests alone as they are, and return which others go side by side."""
        for batch in list(self._batches):
            if not set(batch.requests) <= set(fed) or (batch.captured is not None and batch.captured.full):
                self._dissolve(batch)
        batched = {request for batch in self._batches for request in batch.requests}
        if set(fed) == batched:
            return []
        for batch in [b for b in self._batches if len(b.requests) < SLOTS]:
            self._dissolve(batch)
        alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for request in fed:
            if request in self._unbatched:
                alike.setdefault(_shapes(self._unbatched[request], self._captures), []).append(request)
        return [tuple(each[at : at + SLOTS]) for each in alike.values() for at in range(0, len(each), SLOTS)]

    def _stack(self, requests: tuple[int, ...]) -> _Batch:
        state = ModelState.beside([self._unbatched.pop(request) for request in requests], SLOTS)
        if not self._captures or slot_bytes(state) > min(SLOT_BYTES, self._most_bytes):
            return _Batch(requests, state)
        captured = self._captured(state, len(requests))
        return _Batch(requests, captured.state, captured)

    def _captured(self, state: ModelState, rows: int) -> CapturedStep:
        """A captured step that goes on from this state: a free one, or a new one once there is room for its slots."""
        while (captured := next((step for step in self._free if step.fits(state)), None)) is None:
            if slot_bytes(state) + self.held_bytes <= self._most_bytes:
                return CapturedStep(self._model, state, rows=rows, graphs=self._graphs)
            if self._free:
                self._free.pop()
            else:  # the newest, so that most of them stay where all take turns
                self._dissolve(next(batch for batch in reversed(self._batches) if batch.captured is not None))
        self._free.remove(captured)
        captured.load(state, rows=rows)
        return captured

    def _dissolve(self, batch: _Batch) -> None:
        self._batches.remove(batch)
        for slot, request in enumerate(batch.requests):
            if request in self._drawings:
                self._unbatched[request] = batch.state.select(slot)
        if batch.captured is not None and not batch.captured.grows:
            held = [*accumulate(step.slot_bytes for step in (batch.captured, *self._free))]
            kept = zip([batch.captured, *self._free[: KEPT_STEPS - 1]], held, strict=False)
            self._free = [step for step, num_bytes in kept if num_bytes <= SLOT_BYTES]


def _draw(request: int, drawing: _Drawing, logits_V: torch.Tensor) -> Drawn | RequestFault:
    barred = drawing.ends if drawing.draws < drawing.spec.min_tokens else ()
    try:
        allowed = [drawing.form and drawing.form.allowed()]
        (token,) = sample(logits_V[None], [drawing.spec], [drawing.generator], [drawing.counts], [barred], allowed)
    except GrammarError as error:
        return RequestFault(request, str(error), Code.INVALID_VALUE)
    except EngineError as error:
        # What is drawn from kept logits began with a stored state, which its caller may have put.
        stored = drawing.logits_V is not None
        return RequestFault(request, str(error), Code.INVALID_STATE if stored else Code.ENGINE_FAILED)
    drawing.draws += 1
    return Drawn(request, token, token_logprobs(logits_V, token, drawing.spec.logprobs))


def _shapes(state: ModelState, in_slots: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes that states must have in common to go side by side: without slots keys are of any number."""
    shapes: list[tuple[int, ...]] = []
    for layer in state.layers:
        if isinstance(layer, SoftmaxState):
            places = (places_for(layer.cache.tokens, layer.window),) if in_slots else ()
            shapes.append((*places, *layer.tail_BKD.shape))
        else:
            shapes += (tuple(tensor.shape) for tensor in layer.tensors())
    return tuple(shapes)

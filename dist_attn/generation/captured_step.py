"""The decode step of one batch over memory that stays: on a GPU a CUDA graph, elsewhere operation by operation.

A step of few sequences is hundreds of small kernels, and launching them takes longer than they do. A graph launches all
of them at once; its inputs and outputs must lie where they lay when it was captured, so the state is kept in buffers
that every step reads and writes: keys and values in slots of a fixed size, of which there are twice as many, with
another graph, when they are full. Tokens are looked up and checked before it, because the host looks at them.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal, Protocol, final
from weakref import WeakKeyDictionary

import torch

from dist_attn.errors import ConfigError, ShapeError
from dist_attn.generation.constant_folding import ConstantFolding
from dist_attn.mixers import MixerState
from dist_attn.mixers.softmax import SoftmaxRows, SoftmaxSlots, SoftmaxState
from dist_attn.models import CausalModel, ModelState
from dist_attn.ops import Watch, current_watch, watching
from dist_attn.ops.gpu_record import record_of
from dist_attn.ops.state import steps_in_place

SLOT_BYTES = 2 << 30
"""Of keys and values in the slots of a batch: longer texts keep their own, and decode operation by operation."""
GROWS = "the state grows with every token, and its slots would take too many bytes"


class Replayed(Protocol):
    """A captured graph: a replay runs all of it again, over the same memory."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None], Callable[[], object], torch.device], Replayed]


def cuda_graph(run: Callable[[], None], warm_up: Callable[[], object], device: torch.device) -> Replayed:
    """The graph of `run`, which is not executed by this; `warm_up` is, and does the same but for what it leaves behind.

    Raises: RuntimeError where some operation waits for the GPU or copies from the host; torch's words say which one.
    """
    with torch.cuda.device(device):
        # Off the main stream, as a capture is: libraries make their workspaces now.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: a prefill, or NCCL's watchdog, which asks after events.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    return graph


@final
class StepGraphs:
    """A maker of graphs for the steps of one model; after one that could not be captured it tries no other.

    Shared by steps that come and go, so that what failed is not tried again by each. `capture` stands in for CUDA's.
    """

    def __init__(self, device: torch.device, capture: Capture | None = None) -> None:
        self._device = device
        self._capture = cuda_graph if capture is None else capture
        # One for all graphs, so that weights are cast once; they read what it holds, and with the last it goes.
        self._foldings = WeakKeyDictionary[Replayed, ConstantFolding]()
        there = capture is not None or device.type == "cuda"
        self._refusal = None if there else f"the model is on {device.type}, and graphs are of CUDA"

    @property
    def refusal(self) -> str | None:
        """The reason why there are no graphs, in words; None while one may be asked for."""
        return self._refusal

    def graph_of(self, model: CausalModel, run: Callable[[], None], warm_up: Callable[[], object]) -> Replayed | None:
        """The graph of `run`, see `cuda_graph`, a step of the model; None where there is a `refusal`."""
        if self._refusal is None:
            there = next(iter(self._foldings.values()), None)
            folding = there or ConstantFolding((*model.parameters(), *model.buffers()))
            try:
                with folding:
                    graph = self._capture(run, warm_up, self._device)
                self._foldings[graph] = folding
                return graph
            except RuntimeError as error:
                self._refusal = f"the step could not be captured ({str(error).splitlines()[0]})"
        return None


StepMode = Literal["auto", "eager", "captured"]


def takes_captured_steps(mode: StepMode, device: torch.device) -> bool:
    """Return whether decoding goes through `CapturedStep`: "captured" always, "eager" never.

    "auto" does so on a GPU where captured steps came out right on a device of that name (`ops.gpu_record`).

    Raises: ConfigError for another mode.
    """
    if mode not in ("auto", "eager", "captured"):
        raise ConfigError(f"steps {mode!r} are unknown; use auto, eager or captured")
    record = record_of(device) if mode == "auto" else None
    return mode == "captured" or (record is not None and record.captured_steps is True)


@final
class CapturedStep:
    """`model.step` for one batch, which keeps the state itself.

    The first step runs operation by operation, the second is captured where that can be; `how` says which it is, and
    why. `rows` are the batch elements that count for a watch of guarded denominators, whatever the watch itself says:
    the first so many, or all of them (None). While numbers that are not finite are looked for, steps run operation
    by operation. Steps that share `graphs` share what is known of captures that failed.
    """

    def __init__(
        self, model: CausalModel, state: ModelState, *, rows: int | None = None, graphs: StepGraphs | None = None
    ) -> None:
        self._model = model
        self._left = math.inf  # steps until a slot is full
        self._grows = slot_bytes(state) > SLOT_BYTES
        self._state = _copied(state) if self._grows else self._in_slots(state)
        self._x_BD: torch.Tensor | None = None
        self._logits_BV: torch.Tensor | None = None
        device = model.device
        self._graphs = StepGraphs(device) if graphs is None else graphs
        self._graph: Replayed | None = None
        self._counts = Watch()  # of the step last replayed; it lives as long as the graph that writes it
        self._counts.counting_B = torch.ones_like(self._state.position_B, dtype=torch.bool)
        self._rows: int | None = None
        self._count(rows)

    @property
    def how(self) -> str:
        """In words, how steps are taken: "a CUDA graph", or why operation by operation."""
        if self._graph is not None:
            return "a CUDA graph"
        why = self._graphs.refusal or "no step has been captured yet"
        if self._grows:
            why = GROWS
        return f"operation by operation: {why}"

    @property
    def grows(self) -> bool:
        """Return whether steps make the state larger, so that its buffers cannot take another state.

        It remains so: a state that has grown once has no size to come back to.
        """
        return self._grows

    @property
    def state(self) -> ModelState:
        """The state after the last step, in the buffers that the next step writes; take a copy of what is to stay."""
        return self._state

    @property
    def full(self) -> bool:
        """Return whether the next step needs larger slots."""
        return self._left < 1

    @property
    def slot_bytes(self) -> int:
        """The bytes that keys and values take in their slots."""
        slots = (layer.slots for layer in self._state.layers if isinstance(layer, SoftmaxSlots))
        return sum(each.k_BGRK.nbytes + each.v_BGRV.nbytes for each in slots)

    def fits(self, state: ModelState) -> bool:
        """Return whether `load` can take this state."""
        pairs = zip(self._state.layers, state.layers, strict=True)
        return not self._grows and state.batch == self._state.batch and all(_takes(own, new) for own, new in pairs)

    def load(self, state: ModelState, *, rows: int | None = None) -> None:
        """Go on from another state, of which so many rows count, with the graph that is there.

        Raises: ShapeError for a state of other shapes: those that were captured stay.
        """
        if not self.fits(state):
            raise ShapeError(
                f"a state of tensors {_shapes(state)} was given; this step keeps {_shapes(self._state)}"
                f"{', which grow' if self._grows else ''}: make another"
            )
        with torch.inference_mode():
            for own, new in zip(self._state.layers, state.layers, strict=True):
                if isinstance(own, SoftmaxSlots):
                    assert isinstance(new, SoftmaxState | SoftmaxRows)
                    own.take(new)
                else:
                    _copy(own.tensors(), new.tensors())
            self._state.position_B.copy_(state.position_B)
        self._left = _steps_left(state)
        self._count(rows)

    @torch.inference_mode()
    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """The logits [B, vocabulary] after one more token for each sequence; the next step writes over them.

        Raises: as `CausalModel.step`.
        """
        if self.full:
            self._enlarge()
        self._left -= 1
        x_BD = self._model.embed_step(token_B, self._state)
        watch = current_watch()
        looked_at = watch is not None and watch.finite is not None
        first = self._x_BD is None
        if self._x_BD is None:
            self._x_BD = x_BD.clone()
        else:
            self._x_BD.copy_(x_BD)
        if not (first or self._grows or looked_at) and self._graph is None:
            self._graph = self._graphs.graph_of(self._model, self._run_counted, self._warm_up)
        if self._graph is None or looked_at:
            self._run_watched(watch)
        else:
            self._graph.replay()
            if watch is not None:
                # The graph counts the denominators of all rows: how many there are is a number of the host.
                batch = len(token_B)
                counting = batch if self._rows is None else min(self._rows, batch)
                watch.add(self._counts, denominators=self._counts.denominators // batch * counting)
        self._state.position_B.add_(1)
        assert self._logits_BV is not None
        return self._logits_BV

    @torch.inference_mode()
    def _count(self, rows: int | None) -> None:
        """Let so many rows count from now on, in a graph that is there already too."""
        self._rows = rows
        assert self._counts.counting_B is not None
        self._counts.counting_B.zero_()[:rows] = True

    def _run_watched(self, watch: Watch | None) -> None:
        if watch is None:
            self._run()
            return
        before, watch.rows = watch.rows, self._rows
        try:
            self._run()
        finally:
            watch.rows = before

    def _run_counted(self) -> None:
        """Run the step that a graph is captured of, which counts into memory of its own."""
        self._counts.clear()
        with watching(self._counts):
            self._run()

    def _warm_up(self) -> None:
        """Run the step once and restore the state: a kernel that is first loaded during a capture may break it.

        Keys and values in slots need no copy: the step that follows writes the same place of each.
        """
        kept = [tensor.clone() for tensor in _beside_slots(self._state)]
        try:
            self._run_counted()
        finally:
            _copy(_beside_slots(self._state), kept)

    def _run(self) -> None:
        """One step over the buffers: states are written where they lie, and what a mixer makes anew is copied there."""
        assert self._x_BD is not None
        watch = current_watch()
        looked_at = watch is not None and watch.finite is not None  # also at the state before
        with nullcontext() if looked_at else steps_in_place():
            logits_BV, layers = self._model.step_layers(self._x_BD, self._state)
        after = ModelState(layers, self._state.position_B)
        if _shapes(after) != _shapes(self._state):
            # The first token may bring the precision in which keys and values are kept.
            sizes = [[tensor.shape for tensor in each.tensors()] for each in (after, self._state)]
            self._grows = self._logits_BV is not None or sizes[0] != sizes[1]
            self._state, self._logits_BV = after, logits_BV
            return
        _copy(self._state.tensors(), after.tensors())
        if self._logits_BV is None:
            self._logits_BV = logits_BV.clone()
        else:
            self._logits_BV.copy_(logits_BV)

    def _in_slots(self, state: ModelState) -> ModelState:
        """A copy of a state in memory where steps can be captured."""
        self._left = _steps_left(state)
        layers = (SoftmaxSlots.of(s) if isinstance(s, SoftmaxState | SoftmaxRows) else s for s in state.layers)
        return _copied(ModelState(tuple(layers), state.position_B))

    def _enlarge(self) -> None:
        """Twice the places, and another graph; or none any more, where these would be too many bytes."""
        batch = self._state.batch
        rows = ModelState.beside([self._state.select(row) for row in range(batch)], batch)
        self._graph, self._grows = None, slot_bytes(rows) > SLOT_BYTES
        self._state, self._left = rows, math.inf
        if not self._grows:
            self._state = self._in_slots(rows)


def slot_bytes(state: ModelState) -> int:
    """The bytes that keys and values of these sequences would take in slots."""
    return sum(SoftmaxSlots.num_bytes(s) for s in state.layers if isinstance(s, SoftmaxState | SoftmaxRows))


def _beside_slots(state: ModelState) -> list[torch.Tensor]:
    """The tensors of the layers but for keys and values in slots."""
    found: list[torch.Tensor] = []
    for layer in state.layers:
        found += (layer.slots.tokens_B, layer.tail_BKD) if isinstance(layer, SoftmaxSlots) else layer.tensors()
    return found


def _takes(own: MixerState, new: MixerState) -> bool:
    """Return whether a layer's buffers hold such a state."""
    if isinstance(own, SoftmaxSlots):
        return isinstance(new, SoftmaxState | SoftmaxRows) and own.takes(new)
    kinds = ([(t.shape, t.dtype) for t in layer.tensors()] for layer in (own, new))
    return type(own) is type(new) and next(kinds) == next(kinds)


def _steps_left(state: ModelState) -> float:
    """Until a slot is full."""
    growing = (layer for layer in state.layers if isinstance(layer, SoftmaxState | SoftmaxRows))
    return min(map(SoftmaxSlots.steps_left, growing), default=math.inf)


def _copied(state: ModelState) -> ModelState:
    """In memory of its own; slots are."""
    layers = (
        layer if isinstance(layer, SoftmaxSlots) else layer.replace(tuple(t.clone() for t in layer.tensors()))
        for layer in state.layers
    )
    return ModelState(tuple(layers), state.position_B.clone())


def _copy(own: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    """Write into buffers what does not lie there, on a GPU by one kernel for each type."""
    pairs = [(to, tensor) for to, tensor in zip(own, new, strict=True) if to is not tensor]
    for dtype in dict.fromkeys(to.dtype for to, _ in pairs):
        some = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_copy_([to for to, _ in some], [tensor for _, tensor in some])


def _shapes(state: ModelState) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in state.tensors()]

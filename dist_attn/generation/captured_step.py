"""The decode step of one batch over memory that stays: on a GPU a CUDA graph, elsewhere operation by operation.

A step of few sequences is hundreds of small kernels, and launching them takes longer than they do. A graph launches all
of them at once; its inputs and outputs must lie where they lay when it was captured, so the state is kept in buffers
that every step reads and writes. Tokens are looked up and checked before it, because the host looks at them.
"""

from typing import Literal, final

import torch

from dist_attn.errors import ConfigError, ShapeError
from dist_attn.models import LanguageModel, ModelState
from dist_attn.ops import Watch, current_watch, watching

__all__ = ["CapturedStep", "StepMode", "takes_captured_steps"]

StepMode = Literal["auto", "eager", "captured"]
# What is captured was only seen operation by operation on a CPU; no GPU was there to replay it on.
GRAPHS_RAN_ON_A_GPU = False


def takes_captured_steps(mode: StepMode, device: torch.device) -> bool:
    """Whether decoding goes through `CapturedStep`: "captured" always, "eager" never.

    "auto" shall do so on a GPU, once graphs have run on one (`GRAPHS_RAN_ON_A_GPU`).

    Raises: ConfigError for another mode.
    """
    if mode not in ("auto", "eager", "captured"):
        raise ConfigError(f"steps {mode!r} are unknown; use auto, eager or captured")
    return mode == "captured" or (mode == "auto" and device.type == "cuda" and GRAPHS_RAN_ON_A_GPU)


@final
class CapturedStep:
    """`model.step` for one batch, which keeps the state itself.

    The first step runs operation by operation, the second is captured where that can be; `how` says which it is, and
    why. `rows` are the batch elements that count for a watch of guarded denominators, all of them by default. While
    somebody looks for numbers that are not finite, steps run operation by operation.
    """

    def __init__(self, model: LanguageModel, state: ModelState, *, rows: int | None = None) -> None:
        self._model = model
        self.rows = rows
        self._state = state.select(slice(None))
        self._x_BD: torch.Tensor | None = None
        self._logits_BV: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._counts = Watch()  # of the step last replayed
        self._grows = False
        device = model.embedding.weight.device.type
        self._may_capture = device == "cuda"
        why = "no step has been taken yet" if self._may_capture else f"the model is on {device}, and graphs are of CUDA"
        self.how = f"operation by operation: {why}"

    @property
    def grows(self) -> bool:
        """Whether the state has no fixed size, so that nothing stays and there is nothing to load another one into."""
        return self._grows

    @property
    def state(self) -> ModelState:
        """The state after the last step, in the buffers that the next step writes; take a copy of what is to stay."""
        return self._state

    def fits(self, state: ModelState, rows: int | None) -> bool:
        """Whether `load` can take this state, for as many rows that count."""
        return self.rows == rows and _shapes(self._state) == _shapes(state)

    def load(self, state: ModelState) -> None:
        """Go on from another state.

        Raises: ShapeError for a state of other shapes: those that were captured stay.
        """
        if not self.fits(state, self.rows):
            raise ShapeError(
                f"a state of tensors {_shapes(state)} was given; this step keeps {_shapes(self._state)}: make another"
            )
        with torch.inference_mode():
            self._keep(state)

    @torch.inference_mode()
    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """The logits [B, vocabulary] after one more token for each sequence; the next step writes over them.

        Raises: as `LanguageModel.step`.
        """
        x_BD = self._model.embed_step(token_B, self._state)
        watch = current_watch()
        looked_at = watch is not None and watch.finite is not None
        if self._x_BD is None:
            self._x_BD = x_BD.clone()
            self._run()
        else:
            self._x_BD.copy_(x_BD)
            if self._may_capture and self._graph is None and not looked_at:
                self._capture()
            if self._graph is None or looked_at:
                self._run()
            else:
                self._graph.replay()
                if watch is not None:
                    watch.add(self._counts)
        self._state.position_B.add_(1)
        assert self._logits_BV is not None
        return self._logits_BV

    def _run(self) -> None:
        """One step over the buffers; what a graph is captured of."""
        assert self._x_BD is not None
        logits_BV, layers = self._model.step_layers(self._x_BD, self._state.layers)
        after = ModelState(layers, self._state.position_B)
        if _shapes(after) != _shapes(self._state):
            self._may_capture, self._grows = False, True
            self.how = "operation by operation: the state grows with every token, and a graph has one size"
            self._state, self._logits_BV = after, logits_BV
            return
        self._keep(after)
        if self._logits_BV is None:
            self._logits_BV = logits_BV.clone()
        else:
            self._logits_BV.copy_(logits_BV)

    def _capture(self) -> None:
        assert self._x_BD is not None
        device = self._x_BD.device
        try:
            with torch.cuda.device(device):
                # Off the main stream, as a capture is: libraries make their workspaces now. No buffer changes.
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), watching(None):
                    self._model.step_layers(self._x_BD, self._state.layers)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                self._counts = Watch()
                self._counts.rows = self.rows
                with torch.cuda.graph(graph), watching(self._counts):
                    self._run()
        except RuntimeError as error:
            # Some operation waits for the GPU or copies from the host; which one, torch's words say.
            self._may_capture = False
            self.how = f"operation by operation: the step could not be captured ({str(error).splitlines()[0]})"
            return
        self._graph = graph
        self.how = "a CUDA graph"

    def _keep(self, after: ModelState) -> None:
        """Write a state into the buffers."""
        for own, new in zip(_tensors(self._state), _tensors(after), strict=True):
            if own is not new:
                own.copy_(new)


def _tensors(state: ModelState) -> list[torch.Tensor]:
    return [state.position_B, *(tensor for layer in state.layers for tensor in layer.tensors())]


def _shapes(state: ModelState) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(state)]

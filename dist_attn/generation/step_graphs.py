"""CUDA graphs of what a step does, and once one could not be captured, why there are none."""

from collections.abc import Callable
from typing import Protocol, final

import torch

__all__ = ["Capture", "Replayed", "StepGraphs", "cuda_graph"]


class Replayed(Protocol):
    """What was captured: over the same memory, all of it again."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None], Callable[[], object], torch.device], Replayed]


def cuda_graph(run: Callable[[], None], warm_up: Callable[[], object], device: torch.device) -> Replayed:
    """The graph of `run`, which is not executed by this; `warm_up` is, and does the same without writing buffers.

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
        with torch.cuda.graph(graph):
            run()
    return graph


@final
class StepGraphs:
    """Where the steps of one model get their graphs; after one that could not be captured no other is tried.

    Shared by steps that come and go, so that what failed is not tried again by each. `capture` stands in for CUDA's.
    """

    def __init__(self, device: torch.device, capture: Capture | None = None) -> None:
        self._device = device
        self._capture = cuda_graph if capture is None else capture
        there = capture is not None or device.type == "cuda"
        self._refusal = None if there else f"the model is on {device.type}, and graphs are of CUDA"

    @property
    def refusal(self) -> str | None:
        """Why there are no graphs, in words; None while one may be asked for."""
        return self._refusal

    def graph_of(self, run: Callable[[], None], warm_up: Callable[[], object]) -> Replayed | None:
        """The graph of `run`, see `cuda_graph`; None where there is a `refusal`."""
        if self._refusal is None:
            try:
                return self._capture(run, warm_up, self._device)
            except RuntimeError as error:
                self._refusal = f"the step could not be captured ({str(error).splitlines()[0]})"
        return None

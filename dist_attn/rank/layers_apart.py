"""Decoding where each rank has some of the layers: all take part in a step, the last one draws and tells the others.

A rank keeps the states of its own layers alone; they are put together where a state is to leave the ranks.
"""

from dataclasses import dataclass, replace

import torch

from dist_attn.comm import Communicator
from dist_attn.generation import StateShapes
from dist_attn.models import ModelState
from dist_attn.rank.state_bytes import read_state, write_state

__all__ = ["LayersApart"]

FAULT = -1


@dataclass(frozen=True)
class LayersApart:
    """The layers' states of each rank, `of_ranks`, in a group that makes the same calls in the same order."""

    comm: Communicator
    of_ranks: tuple[slice, ...]
    shapes: StateShapes

    @property
    def draws(self) -> bool:
        """Return whether this is the rank that has the logits."""
        return self.comm.rank == self.comm.size - 1

    def own(self, state: ModelState) -> ModelState:
        """The layers of this rank, out of a state of all."""
        return replace(state, layers=state.layers[self.of_ranks[self.comm.rank]])

    def tell(self, tokens: list[int]) -> list[int]:
        """The tokens that the last rank has drawn, on every rank; FAULT for one that it could not draw."""
        drawn = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        told: list[int] = self.comm.broadcast(drawn, self.comm.size - 1, label="drawn").tolist()
        return told

    def to_last(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Rows of rank `source`, on the last rank; none on the others. Shapes: [N, ...] -> [N, ...]."""
        if source == self.comm.size - 1:
            return x
        sends = {self.comm.size - 1: len(x)} if self.comm.rank == source else {}
        receives = {source: len(x)} if self.draws else {}
        return self.comm.send_receive(x if sends else x[:0], sends, receives, label="to_last")

    def whole(self, state: ModelState) -> ModelState | None:
        """Bring each rank's layers of a text's state together: the whole state on the last rank, None elsewhere."""
        data = torch.frombuffer(bytearray(write_state(state)), dtype=torch.uint8)
        sizes = self.comm.all_gather(torch.tensor(len(data), device="cpu"), label="states").tolist()
        layers = list(self.shapes.empty.layers)
        for rank, own in enumerate(self.of_ranks):
            sent = self.to_last(data if rank == self.comm.rank else data.new_zeros(sizes[rank]), rank)
            if self.draws:
                layers[own] = read_state(sent.numpy().tobytes(), self._shapes_of(own)).layers
        return replace(state, layers=tuple(layers)) if self.draws else None

    def _shapes_of(self, own: slice) -> StateShapes:
        empty, grown = (replace(each, layers=each.layers[own]) for each in (self.shapes.empty, self.shapes.grown))
        return StateShapes(empty, grown)

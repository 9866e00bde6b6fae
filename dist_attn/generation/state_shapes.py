"""Shapes and types of a model's states after any number of tokens: some tensors keep theirs, caches get longer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dist_attn.errors import InputError, StateMismatchError
from dist_attn.mixers import GrowingState, MixerState
from dist_attn.models import ModelState, StreamingModel

__all__ = ["StateShapes"]

TRIED_TOKENS = 2


@dataclass(frozen=True)
class StateShapes:
    """The states of one sequence before any token and after two; a dimension in which they differ grows with the text.

    A state that two tokens leave as large as the empty one stays so.
    """

    empty: ModelState
    grown: ModelState

    @staticmethod
    @torch.inference_mode()
    def of(model: StreamingModel) -> "StateShapes":
        """Those of a model, on its device. Cost: two tokens."""
        empty = model.initial_state(1)
        tokens_BL = torch.zeros(1, TRIED_TOKENS, dtype=torch.int64, device=empty.position_B.device)
        return StateShapes(empty, model.hidden(tokens_BL, None, empty)[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of a state, what grows left out."""
        pairs = zip(_tensors(self.empty), _tensors(self.grown), strict=True)
        return sum(before.numel() * after.element_size() for before, after in pairs)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds at most; 0 where the state has one size."""
        grown = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.grown))
        return max(0, -(-(grown - self.num_bytes) // TRIED_TOKENS))

    def like(self, layer: int, index: int) -> torch.Tensor:
        """A tensor of the type of tensor `index` of a layer, where it lies."""
        return self.grown.layers[layer].tensors()[index]

    def check(self, name: str, layer: int, index: int, shape: Sequence[int], dtype: object, position: int) -> None:
        """See whether a tensor without the batch may be tensor `index` of a layer, after `position` tokens.

        Raises: StateMismatchError with its name, both shapes and both types.
        """
        before, after = self.empty.layers[layer].tensors()[index], self.like(layer, index)
        needed = [
            short if short == long else position for short, long in zip(before.shape[1:], after.shape[1:], strict=True)
        ]
        # What says itself how long it may be is asked once it is whole.
        grows = isinstance(self.grown.layers[layer], GrowingState)
        fits = len(shape) == len(needed) and all(
            has == need or (grows and short != long and has < need)
            for has, need, short, long in zip(shape, needed, before.shape[1:], after.shape[1:], strict=True)
        )
        if not fits or dtype != after.dtype:
            raise StateMismatchError(
                f"{name} is {dtype} {list(shape)}; a state of the model here has {after.dtype} {needed}"
            )

    def state(self, position: int, tensor: Callable[[int, int], torch.Tensor]) -> ModelState:
        """The state after `position` tokens; `tensor(layer, index)` gives its tensors, with the batch.

        Raises: StateMismatchError where the lengths of a layer's tensors do not go together.
        """
        layers: list[MixerState] = []
        for number, layer in enumerate(self.empty.layers):
            restored = layer.replace(tuple(tensor(number, index) for index in range(len(layer.tensors()))))
            try:
                layers.append(restored.standing_at(position) if isinstance(restored, GrowingState) else restored)
            except InputError as error:
                raise StateMismatchError(f"layer {number}: {error}") from None
        device = self.empty.position_B.device
        return ModelState(tuple(layers), torch.full((1,), position, dtype=torch.int64, device=device))


def _tensors(state: ModelState) -> list[torch.Tensor]:
    return [*(tensor for layer in state.layers for tensor in layer.tensors()), state.position_B]

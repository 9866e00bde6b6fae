"""What the tokens so far leave behind in causal kernel attention: a value of constant size."""

from dataclasses import dataclass

import torch

from dist_attn.ops import LinearState

__all__ = ["KernelState", "attention_shapes"]


@dataclass(frozen=True)
class KernelState:
    """The attention state, the last tokens that the short convolution still needs, and how far rotary positions are.

    Where keys have weights the attention state is held in units of exp(unit), which cancel in outputs. `kind` is the
    mixer's: features of another kind may be as many, and mean something else.
    """

    attention: LinearState
    tail_BKD: torch.Tensor
    kind: str
    position_B: torch.Tensor | None = None  # tokens so far, where positions are rotary
    unit_BH: torch.Tensor | None = None  # float64, where keys have weights

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        optional = (t for t in (self.position_B, self.unit_BH) if t is not None)
        return (*self.attention.tensors(), self.tail_BKD, *optional)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "KernelState":
        """The same kind of state over other tensors."""
        count = len(self.attention.tensors())
        optional = iter(tensors[count + 1 :])
        position_B = None if self.position_B is None else next(optional)
        unit_BH = None if self.unit_BH is None else next(optional)
        return KernelState(LinearState(*tensors[:count]), tensors[count], self.kind, position_B, unit_BH)

    def advanced(
        self, attention: LinearState, tail_BKD: torch.Tensor, tokens: int, unit_BH: torch.Tensor | None
    ) -> "KernelState":
        """The state after `tokens` more, with what they leave behind."""
        position_B = None if self.position_B is None else self.position_B + tokens
        return KernelState(attention, tail_BKD, self.kind, position_B, unit_BH)


def attention_shapes(batch: int, heads: int, features: int, values: int) -> list[tuple[int, ...]]:
    """Shapes of the tensors of a `LinearState`, in their order."""
    each = (batch, heads)
    return [(*each, features, values), (*each, features), each, each, each]

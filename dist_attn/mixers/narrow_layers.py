"""Layers whose weights lie in memory as bfloat16 or 8-bit integers; what goes in and out stays what it was.

They are made of trained layers, for reading and writing only: what they have rounded away would stop training. They
tell the two apart by shape: [B, I] is one token of each sequence, a step, and [B, L, I] are slices that are read.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Self, final

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.ops.narrow_weights import bfloat16_linear, int8_linear, int8_step_linear, round_rows, widen_rows
from dist_attn.wire.choices import WeightPrecision


class NarrowLayer(nn.Module, ABC):
    """Weights of fewer bits than float32, [O, I]: a row for each output or, in an embedding, for each token."""

    precision: ClassVar[WeightPrecision]
    weight: nn.Parameter

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of a linear layer, in memory of their own, or the vectors of tokens of an embedding."""

    @abstractmethod
    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x w^T, [..., I] -> [..., O] in x's dtype, without a bias and in memory of its own; [B, I] is a decode step.

        Raises: InputError where a gradient would have to flow.
        """

    def train(self, mode: bool = True) -> Self:
        """Raises: InputError for `mode`, as rounded weights cannot be trained."""
        if mode:
            refuse_training(self)
        return super().train(mode)

    def _refuse_gradients(self, x: torch.Tensor) -> None:
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"a gradient was asked for through weights held as {self.precision}; load the model with weights "
                "float32, or work under torch.no_grad()"
            )


class _Int8(NarrowLayer):
    """8-bit integers with a scale for each row, symmetric."""

    precision = "int8"

    def __init__(self, w_OI: torch.Tensor) -> None:
        super().__init__()
        q_OI, scale_O = round_rows(w_OI)
        # Parameters, not buffers: buffers are what a model has by its seeds.
        self.weight = nn.Parameter(q_OI, requires_grad=False)
        self.scale = nn.Parameter(scale_O, requires_grad=False)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        self._refuse_gradients(x)
        linear = int8_step_linear if x.dim() == 2 else int8_linear
        return linear(x, self.weight, self.scale)


class _Bfloat16(NarrowLayer):
    """bfloat16: the upper half of each float32."""

    precision = "bfloat16"

    def __init__(self, w_OI: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(w_OI.detach().bfloat16(), requires_grad=False)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        self._refuse_gradients(x)
        return bfloat16_linear(x, self.weight)


@final
class Int8Linear(_Int8):
    """A linear layer of int8 weights with one scale for each output; the bias stays as it was."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight)
        self.bias = _fixed(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O]."""
        return _with_bias(self.project(x), self.bias)


@final
class Bfloat16Linear(_Bfloat16):
    """A linear layer of bfloat16 weights; the bias stays as it was."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight)
        self.bias = _fixed(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O]."""
        return _with_bias(self.project(x), self.bias)


@final
class Int8Embedding(_Int8):
    """A table of int8 rows with a scale for each token; `project` reads out with the same rows."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vectors of tokens in float32, [...] int64 -> [..., I]."""
        return widen_rows(self.weight[tokens], self.scale[tokens])


@final
class Bfloat16Embedding(_Bfloat16):
    """A table of bfloat16 rows; `project` reads out with the same rows."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vectors of tokens in float32, [...] int64 -> [..., I]."""
        return self.weight[tokens].float()


def refuse_training(module: nn.Module) -> None:
    """Refuse to train narrow weights; a model's `train` asks first, so that nothing is left in training mode.

    Raises: InputError where any weights below `module` are narrow.
    """
    for layer in module.modules():
        if isinstance(layer, NarrowLayer):
            raise InputError(
                f"training was asked of weights held as {layer.precision}, which only read and write; load the model "
                "with weights float32 to train it"
            )


def empty_output(layer: nn.Linear | NarrowLayer) -> torch.Tensor:
    """An empty tensor of the type and device of a linear layer's output, for inputs of float32 or of its own type."""
    dtype = torch.float32 if isinstance(layer, NarrowLayer) else layer.weight.dtype
    return torch.empty(0, dtype=dtype, device=layer.weight.device)  # not of the weight: that one may be sharded


def _fixed(bias: nn.Parameter | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y + bias, written over y, which nothing else refers to and no gradient is of."""
    return y if bias is None else y.add_(bias)

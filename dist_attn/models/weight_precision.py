"""Holding a trained model's weights in fewer bits: bfloat16, or 8-bit integers with a scale for each output.

| part | what becomes of it | why |
|---|---|---|
| linear layers | rounded | all of their weights are read for every token that is written: they are its time |
| the table of tokens, and a read-out of its own | rounded | likewise; it is the largest matrix of a small model |
| gates | float32 | a gate near 1 loses its digits, and with them how long it remembers; a row for each head |
| norms, biases, sigmas, short convolutions, learned positions | float32 | few, or few of them read for a token |
| state spaces, random matrices | float32 | errors are raised to powers, or make other features |
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import nn

from dist_attn.errors import ConfigError, InputError
from dist_attn.mixers.narrow_layers import Bfloat16Embedding, Bfloat16Linear, Int8Embedding, Int8Linear, NarrowLayer
from dist_attn.models.language_model import LanguageModel
from dist_attn.ops.narrow_weights import bfloat16_product, int8_product
from dist_attn.wire.choices import WeightPrecision

KEPT = ("gate",)  # names of linear layers that stay in float32


@dataclass(frozen=True)
class WeightReport:
    """The precision of a model's weights, the bytes that it saves, and the products that it leads to.

    Units: bytes of all parameters and buffers. `layers` are rounded ones; `products` says how many of them are
    multiplied how in a decode step: int8 weights "packed", as they are, or "widened" to bfloat16
    first; bfloat16 ones in "bfloat16" or "float32", as the machine can.
    """

    precision: WeightPrecision
    layers: int
    bytes_before: int
    bytes_after: int
    products: Mapping[str, int] = field(default_factory=dict)

    def sentence(self) -> str:
        """The report in words, for a log."""
        products = ", ".join(f"{count} {name}" for name, count in self.products.items())
        return (
            f"weights are held as {self.precision}: {self.bytes_after / 2**20:.1f} MiB in place of "
            f"{self.bytes_before / 2**20:.1f}; layers by their products: {products or 'all float32'}"
        )


def check_precision(precision: str) -> None:
    """Raises: ConfigError for a precision that there is not."""
    if precision not in (known := get_args(WeightPrecision)):
        raise ConfigError(f"weights {precision!r} were asked for; choose {', '.join(known[:-1])} or {known[-1]}")


def hold_weights_as(model: nn.Module, precision: WeightPrecision) -> WeightReport:
    """Replace the linear layers of a language model, and its tables, by rounded ones, where they lie.

    The model then serves inference only: `train()`, gradients and saving it are refused. With float32, or where an
    error is raised, it is left as it is.

    Raises: ConfigError for another kind of model, one that is rounded already, or a precision that there is not;
        InputError for weights that are not finite.
    """
    check_precision(precision)
    before = weight_bytes(model)
    if precision == "float32":
        return WeightReport("float32", 0, before, before)
    if not isinstance(model, LanguageModel):
        kind = type(model).__name__
        raise ConfigError(
            f"weights {precision} were asked of a {kind}; only language models hold them so: take float32"
        )
    if (present := weight_precision_of(model)) != "float32":
        raise ConfigError(f"the weights are held as {present} already; load the model anew to hold them as {precision}")
    linear, table = _LAYERS[precision]
    layers = [(name, module) for name, module in model.named_modules() if _is_rounded(name, module)]
    for name, module in layers:
        _check_finite(name, module, precision)
    for name, module in layers:
        parent, _, own = name.rpartition(".")
        made = linear(module) if isinstance(module, nn.Linear) else table(module.weight)
        setattr(model.get_submodule(parent), own, made.train(False))
    model.requires_grad_(False)
    return WeightReport(precision, len(layers), before, weight_bytes(model), _products(model))


def weight_precision_of(model: nn.Module) -> WeightPrecision:
    """The precision of the weights that are not always float32."""
    precisions = {module.precision for module in model.modules() if isinstance(module, NarrowLayer)}
    if precisions:
        return precisions.pop()
    return "bfloat16" if any(weight.dtype == torch.bfloat16 for weight in model.parameters()) else "float32"


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers as they lie in memory."""
    return sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


_LAYERS: dict[str, tuple[Callable[[nn.Linear], NarrowLayer], Callable[[nn.Parameter], NarrowLayer]]] = {
    "bfloat16": (Bfloat16Linear, Bfloat16Embedding),
    "int8": (Int8Linear, Int8Embedding),
}


def _is_rounded(name: str, module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return name.rpartition(".")[2] not in KEPT
    return name == "embedding"


def _check_finite(name: str, module: nn.Module, precision: WeightPrecision) -> None:
    if not bool(module.get_parameter("weight").isfinite().all()):
        raise InputError(
            f"{name}.weight holds NaN or infinite numbers, which have no form as {precision}; train the model again, "
            "or take a checkpoint from before"
        )


def _products(model: nn.Module) -> dict[str, int]:
    """Count the layers by the kind of product that multiplies them."""
    counts = Counter[str]()
    for layer in (module for module in model.modules() if isinstance(module, NarrowLayer)):
        device, inputs = layer.weight.device, layer.weight.shape[1]
        counts[int8_product(device, inputs) if layer.precision == "int8" else bfloat16_product(device)] += 1
    return dict(counts)

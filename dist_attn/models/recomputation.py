"""Activation checkpointing: a layer keeps its inputs only, and its backward pass computes the rest again."""

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_attn.ops import watching

Given = TypeVarTuple("Given")
Result = TypeVar("Result")


class Recomputable(nn.Module):
    """A layer that can do without its activations; `recompute_layers` makes it so."""

    recomputes = False

    def _run(self, compute: Callable[[*Given], Result], *args: *Given) -> Result:
        """What `compute` returns; where this layer recomputes, its backward pass calls it once more."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return compute(*args)
        again = False

        def run(*args: *Given) -> Result:
            nonlocal again
            if not again:
                again = True
                return compute(*args)
            with watching(None):  # it was watched the first time
                return compute(*args)

        # No layer draws random numbers, so there is no generator to wind back. `checkpoint` stops once it has the last
        # tensor that it needs: one of the MLP's, which lies behind every exchange of the layer, on every rank.
        result: Result = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        return result


def recompute_layers(model: nn.Module, wanted: bool = True) -> int:
    """Let every layer of the model recompute its activations in the backward pass, or none; how many layers it has.

    Losses and gradients are bitwise those without. Across ranks the recomputation exchanges what the forward pass did,
    under the same labels: every rank enters it at the same place of its backward pass, empty ranks included.

    Cost: one more forward pass of each layer, and its exchanges once more; of a layer's activations only its input
    stays until the backward pass.
    Reference: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
    """
    layers = [module for module in model.modules() if isinstance(module, Recomputable)]
    for layer in layers:
        layer.recomputes = wanted
    return len(layers)

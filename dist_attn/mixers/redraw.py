"""The random matrices that a mixer holds, and new ones for a training step in every mixer that has a pool of them."""

import torch
from torch import nn

from dist_attn.mixers.random_matrices import MatrixConfig, matrices_at_test, matrices_of_step

__all__ = ["RandomMatrices", "redraw_pools"]


class RandomMatrices(nn.Module):
    """What a module with random features has beside its own: a matrix per head, at a training step one of a pool."""

    config: MatrixConfig
    w_HDK: torch.Tensor
    # The pool's matrices of this training step; None at test, and without a pool.
    _drawn_HDK: torch.Tensor | None = None

    def hold_matrices(self) -> None:
        """Take the matrices at test as a buffer."""
        self.register_buffer("w_HDK", matrices_at_test(self.config))

    def matrices(self) -> torch.Tensor:
        """Those of this call, [H, D, K]."""
        return self._drawn_HDK if self.training and self._drawn_HDK is not None else self.w_HDK

    def redraw(self, step: int) -> bool:
        """Take the pool's matrices of a training step; whether there is a pool, and so a state of other features."""
        if not self.config.pool:
            return False
        self._drawn_HDK = matrices_of_step(self.config, step).to(self.w_HDK)
        return True


def redraw_pools(model: nn.Module, step: int) -> bool:
    """Give the mixers with a pool its matrices of a step; whether there is any, and so states of other features.

    A state from before is then one of other features: begin with the initial one.

    Reference: Random Feature Attention, Sec. 3.
    """
    mixers = [module for module in model.modules() if isinstance(module, RandomMatrices)]
    redrawn = [mixer.redraw(step) for mixer in mixers]  # all of them, not up to the first
    return any(redrawn)

"""New random matrices for a training step in every mixer of a model that draws them from a pool."""

from torch import nn

from dist_attn.mixers.kernels import AllKeys
from dist_attn.mixers.random_feature import RandomFeatureAttention

__all__ = ["redraw_pools"]


def redraw_pools(model: nn.Module, step: int) -> bool:
    """Give the mixers with a pool its matrices of a step; whether there is any, and so states of other features.

    A state from before is then one of other features: begin with the initial one.

    Reference: Random Feature Attention, Sec. 3.
    """
    mixers = [module for module in model.modules() if isinstance(module, RandomFeatureAttention | AllKeys)]
    redrawn = [mixer.redraw(step) for mixer in mixers]  # all of them, not up to the first
    return any(redrawn)

"""The papers' kinds of mixers, registered as they are read; no torch."""

from dist_attn_papers.mixers import (
    convolution_configs,
    positive_configs,
    scaleformer_config,
    state_space_configs,
    static_kernel_config,
)

__all__ = [
    "convolution_configs",
    "positive_configs",
    "scaleformer_config",
    "state_space_configs",
    "static_kernel_config",
]

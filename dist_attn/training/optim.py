"""Optimisers and the learning-rate schedule."""

import math

import torch
from torch import nn

from dist_attn.errors import ConfigError
from dist_attn.training.config import OptimiserConfig

__all__ = ["build_optimisers", "schedule"]

# By the ends of their names: the maps inside a block, cross attention's among them; and those around the blocks.
BLOCK_MATRICES = ("cross.q.weight", "kv.weight", "out.weight", "mlp_in.weight", "mlp_out.weight")
OTHER_MATRICES = ("embedding.weight", "head.weight", "projection.weight", "position_map.weight")


def schedule(step: int, steps: int, config: OptimiserConfig) -> float:
    """Compute the share of the peak learning rate at `step`: linear warm-up, then a cosine to `final_ratio`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.final_ratio + (1 - config.final_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def build_optimisers(model: nn.Module, config: OptimiserConfig, *, by_name: bool = True) -> list[torch.optim.Optimizer]:
    """Make one optimiser, or two with Muon. Weight decay reaches matrices only, never norms, gates, sigma or biases.

    Matrices are known by their names, or else by their dimensions, but for decays of recurrences.

    Raises: ConfigError for Muon under a torch that does not have it, and for a rate of sigma where none is learned.
    """
    if config.kind == "muon" and not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"optimiser.kind is muon, but torch {torch.__version__} does not have it: use torch 2.9 or newer, or adamw"
        )
    blocks, matrices, sigmas, rest = (list[nn.Parameter]() for _ in range(4))
    for name, parameter in model.named_parameters():
        if not by_name:
            (matrices if parameter.dim() > 1 and not name.endswith("A_log") else rest).append(parameter)
        elif parameter.dim() == 2 and name.endswith(BLOCK_MATRICES):
            blocks.append(parameter)
        elif parameter.dim() == 2 and name.endswith(OTHER_MATRICES):
            matrices.append(parameter)
        elif config.sigma_learning_rate is not None and name.endswith("sigma_H1K"):
            sigmas.append(parameter)
        else:
            rest.append(parameter)
    decayed = matrices if config.kind == "muon" else blocks + matrices
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if config.sigma_learning_rate is not None:
        if not sigmas:
            raise ConfigError(
                "optimiser.sigma_learning_rate was given, but the model learns no sigma: leave it out, or take mixers "
                "or attention by random features (rfa, rfa_gate)"
            )
        groups.append({"params": sigmas, "weight_decay": 0.0, "lr": config.sigma_learning_rate})
    fused = True if next(model.parameters()).is_cuda else None  # an update of all parameters in a few kernels
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)
    ]
    if config.kind == "muon":
        optimisers.append(
            torch.optim.Muon(
                blocks,
                lr=config.matrix_learning_rate,
                weight_decay=config.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return optimisers

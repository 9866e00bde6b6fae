"""Training: a configuration file in, a run folder with checkpoints, metrics and a model out."""

from dist_attn.training.config import TrainingConfig
from dist_attn.training.loop import train

__all__ = ["TrainingConfig", "train"]

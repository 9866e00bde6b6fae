"""From a configuration to what it trains."""

from dist_attn.training.config import TrainingConfig
from dist_attn.training.language_task import LanguageTask
from dist_attn.training.task import Share, Task

__all__ = ["build_task"]


def build_task(config: TrainingConfig, share: Share) -> Task:
    """The task of `config` for this share of its batches; it reads the data and makes the model.

    Raises: ConfigError for data that is missing or does not fit the model.
    """
    return LanguageTask(config, share)

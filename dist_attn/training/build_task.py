"""From a configuration to what it trains."""

from dist_attn.training.config import TrainingConfig
from dist_attn.training.contrastive_task import ContrastiveTask
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.language_task import LanguageTask
from dist_attn.training.masked_autoencoder_task import MaskedAutoencoderTask
from dist_attn.training.million_task import MillionTask
from dist_attn.training.task import Share, Task
from dist_attn.training.text_classification_task import TextClassificationTask
from dist_attn.training.translation_task import TranslationTask
from dist_attn.training.vision_task import VisionTask

__all__ = ["build_task"]


def build_task(config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> Task:
    """The task of `config` for this share of its batches; it reads the data and makes the model.

    `progress` hears of text that is tokenised.

    Raises: ConfigError for data that is missing or does not fit the model.
    """
    match config.model.kind:
        case "text_classifier":
            return TextClassificationTask(config, share, progress)
        case "million":
            return MillionTask(config, share, progress)
        case "vision_classifier":
            return VisionTask(config, share)
        case "masked_autoencoder":
            return MaskedAutoencoderTask(config, share)
        case "encoder_decoder":
            return TranslationTask(config, share, progress)
    if config.contrast is not None:
        return ContrastiveTask(config, share, progress)
    return LanguageTask(config, share, progress)

"""The papers' tasks and their data, registered for training."""

from dist_attn.training.config import TrainingConfig
from dist_attn.training.kinds import TaskKind, register_task
from dist_attn_papers.made_up import ListOpsConfig, NeedlesConfig
from dist_attn_papers.translation.parallel_text import ParallelTextConfig
from dist_attn_papers.vision.images import ImageDataConfig

__all__ = ["ImageDataConfig", "ListOpsConfig", "NeedlesConfig", "ParallelTextConfig"]


def _check_million(config: TrainingConfig) -> None:
    if config.run.shard_parameters:
        raise ValueError(
            "run.shard_parameters gathers layers equally often on every rank, but a million model reads its sequences "
            "one by one; leave it out"
        )


def _check_translation(config: TrainingConfig) -> None:
    if config.run.shard_parameters and isinstance(config.data, ParallelTextConfig) and config.data.translations:
        raise ValueError(
            "data.translations goes token by token, but under run.shard_parameters layers have their values only while "
            "whole sequences pass; leave one of them out"
        )


_SMOOTHED = ("label_smoothing",)
register_task(
    "million", TaskKind("dist_attn_papers.million.task:MillionTask", ("labelled_text",), _SMOOTHED, _check_million)
)
register_task("vision_classifier", TaskKind("dist_attn_papers.vision.tasks:VisionTask", ("images",), _SMOOTHED))
register_task(
    "masked_autoencoder",
    TaskKind("dist_attn_papers.vision.tasks:MaskedAutoencoderTask", ("images",), ("hidden_share",)),
)
register_task(
    "encoder_decoder",
    TaskKind("dist_attn_papers.translation.task:TranslationTask", ("parallel_text",), _SMOOTHED, _check_translation),
)

"""A rank with a real model whose last layer raises at texts of some lengths, when it has exchanged with the others."""

import sys

from torch import nn

from dist_attn.rank.executor import open_executor
from dist_attn.rank.worker import run_rank
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.rank_link.rank_settings import RankSettings

__all__ = ["EVERYWHERE", "ON_ONE"]

EVERYWHERE, ON_ONE = 777, 779
"""Lengths of texts at which every rank raises, and the last one alone."""


def open_faulty(settings: RankSettings, pulse: Pulse):
    """An executor of the model."""
    made = open_executor(settings, pulse)

    def fail(_: nn.Module, args):
        x_BLD, ops = args[:2]
        total = ops.total_length(x_BLD.shape[1])
        if total == EVERYWHERE or (total == ON_ONE and settings.rank == settings.ranks - 1):
            raise ValueError(f"a text of {total} tokens was met")

    made._model.parts[-1].register_forward_pre_hook(fail)
    return made


if __name__ == "__main__":
    sys.exit(run_rank(RankSettings.from_flags(sys.argv[1:]), open_faulty))

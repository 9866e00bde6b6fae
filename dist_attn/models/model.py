"""The base of models that a folder holds, whatever their kind."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import nn

from dist_attn.errors import ConfigError
from dist_attn.model_config.model import ModelConfig
from dist_attn.ops import SequenceOps


class Model(nn.Module):
    """A model that is made of its configuration."""

    config: ModelConfig

    def begin_from(self, trained: "Model", folder: Path) -> None:
        """Take the weights of the model of a folder, to be trained further.

        Raises: ConfigError where it is another model.
        """
        if trained.config != self.config:
            raise ConfigError(
                f"the model in {folder} is not the one of [model]; leave that section out to have the folder's"
            )
        self.load_state_dict(trained.state_dict())


class SequenceModel(Model, ABC):
    """A model of sequences of up to `max_tokens`, each of them cut over all ranks; none goes on from another."""

    hidden_size: int
    vocab_size: int
    max_tokens: int

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @abstractmethod
    def hidden(self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Hidden states of this process's slice, [B, L] -> [B, L, D]."""

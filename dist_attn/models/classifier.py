"""The text classifier: embedding, encoder over any mixer, mean pooling or class token, linear head."""

import torch
from torch import nn

from dist_attn.models.encoder import Encoder, initialise
from dist_attn.models.encoder_config import TextClassifierConfig
from dist_attn.models.pooling import Pooling
from dist_attn.models.tokens import check_tokens
from dist_attn.ops import LocalSequenceOps, SequenceOps

__all__ = ["TextClassifier"]


class TextClassifier(nn.Module):
    """Logits of the classes of a text, which may be cut across ranks.

    All texts of a batch have one length: a padding token would be a token like any other.

    Reference: Random Feature Attention, Sec. 4.4 (Long Range Arena); Introduction to Transformers, Sec. 4.
    """

    def __init__(self, config: TextClassifierConfig) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.encoder = Encoder(config.encoder)
        self.pooling = Pooling(config.pooling, size, causal=config.encoder.causal)
        self.head = nn.Linear(size, config.num_classes)
        initialise(self, config.encoder.num_layers)

    def prepare(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Whole texts as `forward` takes them, with room for a class token: what is then cut over ranks."""
        return self.pooling.make_room(tokens_BT)

    def forward(self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Logits [B, classes], equal on all ranks, from this process's slice of prepared texts.

        Every rank has the whole loss: it counts once when each divides it by the number of ranks.

        Raises: ShapeError, TokenError for tokens that are none; InputError for no tokens or too many of them.
        """
        ops = LocalSequenceOps() if ops is None else ops
        check_tokens(tokens_BL, ("batch", "length"), self.config.vocab_size)
        x_BLD = self.pooling.fill(self.embedding(tokens_BL), ops)
        logits_BC: torch.Tensor = self.head(self.pooling(self.encoder(x_BLD, ops), ops))
        return logits_BC

    def classify(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes] of whole texts, [B, T]."""
        return self.forward(self.prepare(tokens_BT))

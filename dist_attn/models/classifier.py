"""The text classifier: embedding, encoder over any mixer, mean pooling or class token, linear head."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from dist_attn.errors import ShapeError
from dist_attn.models.encoder import Encoder, initialise
from dist_attn.models.encoder_config import TextClassifierConfig
from dist_attn.models.pooling import Pooling
from dist_attn.models.tokens import check_tokens
from dist_attn.ops import LocalSequenceOps, SequenceOps

__all__ = ["TextClassifier"]


class TextClassifier(nn.Module):
    """Logits of the classes of a text, which may be cut across ranks.

    All texts of a batch have one length: a padding token would be a token like any other. Texts of any lengths go
    packed into one sequence, as documents: `classify_packed`.

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
        logits_BC: torch.Tensor = self.head(self.pooling(self._hidden(tokens_BL, ops), ops))
        return logits_BC

    def pack(self, texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Whole texts, each [T], as `classify_packed` takes them: one row, and where each text starts."""
        prepared = [self.prepare(text_T[None])[0] for text_T in texts]
        starts = accumulate((len(text) for text in prepared[:-1]), initial=0)
        return torch.cat(prepared)[None], tuple(starts)

    def classify_packed(self, tokens_1L: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """Logits [N, classes], equal on all ranks, of the N documents that `ops` have in this process's slice.

        Each is classified as if alone. Every rank has the whole loss, as from `forward`.

        Raises: as `forward`; ShapeError for more than one row.
        """
        if tokens_1L.dim() == 2 and len(tokens_1L) != 1:
            raise ShapeError(f"{len(tokens_1L)} rows of packed texts were given; needed is one")
        vectors_1ND = self.pooling.of_documents(self._hidden(tokens_1L, ops), ops)
        logits_NC: torch.Tensor = self.head(vectors_1ND[0])
        return logits_NC

    def _hidden(self, tokens_BL: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        check_tokens(tokens_BL, ("batch", "length"), self.config.vocab_size)
        h_BLD: torch.Tensor = self.encoder(self.pooling.fill(self.embedding(tokens_BL), ops), ops)
        return h_BLD

    def classify(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes] of whole texts, [B, T]."""
        return self.forward(self.prepare(tokens_BT))

"""The text classifier: embedding, encoder over any mixer, mean pooling or class token, a head for texts or pairs."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import ShapeError
from dist_attn.model_config.encoders import TextClassifierConfig
from dist_attn.models.encoder import Encoder, Pooling, check_tokens, initialise
from dist_attn.models.model import Model
from dist_attn.ops import LocalSequenceOps, SequenceOps


class PairHead(nn.Module):
    """Logits of pairs, by an MLP over both vectors, their product and their difference.

    Shapes: [2 N, D] -> [N, classes]; rows 2i and 2i + 1 are a pair.
    Raises: ShapeError for a vector without a partner.
    Reference: Tay et al. 2020, Long Range Arena (document retrieval).
    """

    def __init__(self, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.projection = nn.Linear(4 * hidden_size, hidden_size)
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        if len(vectors_ND) % 2:
            raise ShapeError(f"{len(vectors_ND)} texts were given to a classifier of pairs; give two for each pair")
        first_ND, second_ND = vectors_ND[::2], vectors_ND[1::2]
        both_NE = torch.cat([first_ND, second_ND, first_ND * second_ND, first_ND - second_ND], dim=-1)
        logits_NC: torch.Tensor = self.head(F.gelu(self.projection(both_NE)))
        return logits_NC


class TextClassifier(Model):
    """Logits of the classes of a text, or of a pair of texts, which may be cut across ranks.

    Where `config.texts` is 2, texts 2i and 2i + 1 are a pair: rows of `forward`, documents of `classify_packed`.

    All texts of a batch have one length: a padding token would be a token like any other. Texts of any lengths go
    packed into one sequence, as documents: `classify_packed`.

    Reference: Random Feature Attention, Sec. 4.4 (Long Range Arena); Introduction to Transformers, Sec. 4.
    """

    config: TextClassifierConfig

    def __init__(self, config: TextClassifierConfig) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.encoder = Encoder(config.encoder)
        self.pooling = Pooling(config.pooling, size, causal=config.encoder.causal)
        pairs = config.texts == 2
        self.head = PairHead(size, config.num_classes) if pairs else nn.Linear(size, config.num_classes)
        initialise(self, config.encoder.num_layers)

    def prepare(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Whole texts as `forward` takes them, with room for a class token: what is then cut over ranks."""
        return self.pooling.make_room(tokens_BT)

    def forward(self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Logits [B, classes], equal on all ranks, from this process's slice of prepared texts; [B / 2, …] of pairs.

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
        """Logits [N, classes], equal on all ranks, of all N documents of `ops`; [N / 2, classes] of pairs.

        Each is classified as if alone. Every rank has the whole loss, as from `forward`.

        Raises: as `forward`; ShapeError for more than one row.
        """
        if tokens_1L.dim() == 2 and len(tokens_1L) != 1:
            raise ShapeError(f"{len(tokens_1L)} rows of packed texts were given; needed is one")
        vectors_1ND = self.pooling.of_documents(self._hidden(tokens_1L, ops), ops)
        logits_NC: torch.Tensor = self.head(vectors_1ND[0])
        return logits_NC

    def _hidden(self, tokens_BL: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        tokens_BL = check_tokens(tokens_BL, ("batch", "length"), self.config.vocab_size, self.embedding.weight.device)
        h_BLD: torch.Tensor = self.encoder(self.pooling.fill(self.embedding(tokens_BL), ops), ops)
        return h_BLD

    def classify(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes] of whole texts, [B, T]."""
        return self.forward(self.prepare(tokens_BT))

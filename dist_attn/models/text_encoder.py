"""The text encoder: one vector for a text, the mean of its hidden states or that of its first token."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import InputError
from dist_attn.model_config.encoders import TextEncoderConfig
from dist_attn.model_config.language_model import mixers_of_layers
from dist_attn.model_config.mixers.attention import BidirectionalConfig
from dist_attn.models.encoder import Encoder, check_tokens, initialise
from dist_attn.models.model import Model
from dist_attn.ops import LocalSequenceOps, SequenceOps


class TextEncoder(Model):
    """Vectors of texts; with blocks that have their norms behind them this is BERT as sentence-transformers uses it.

    A sequence is the text between `prefix` and `suffix`, which `frame` puts there before it is cut over ranks. All
    texts of a batch have one length: a padding token would be a token like any other.

    Reference: Devlin et al. 2019 (the encoder); Reimers and Gurevych 2019 (pooling).
    """

    config: TextEncoderConfig

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        size = config.encoder.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, size)
        # Sentences of a pair have a type each; a text alone is of the first.
        self.type_embedding = nn.Embedding(config.token_types, size) if config.token_types else None
        self.encoder = Encoder(config.encoder)
        self._sequence_tokens: int | None = None  # of short texts that are read together; None: as many as there are
        initialise(self, config.encoder.num_layers)

    def frame(self, text_BT: torch.Tensor) -> torch.Tensor:
        """Whole texts as sequences: prefix, text, suffix."""
        batch = text_BT.shape[0]
        # Filled in where the text is: a copy of the host's numbers would wait for all that is queued there.
        before, after = (
            [text_BT.new_full((batch, 1), token) for token in part] for part in (self.config.prefix, self.config.suffix)
        )
        return torch.cat([*before, text_BT, *after], dim=1)

    def pack_weights(self, rows: int) -> None:
        """Have products of linear layers with so many rows be oneDNN's, for inference in float32 on a CPU.

        They take nine tenths of the time of others, which are MKL's (EPYC, AVX-512). For each number of rows oneDNN
        keeps 0.3 to 1.5 MiB of code per matrix as long as the process lives, so that this is done for one number alone,
        to which `hidden_together` cuts texts where softmax reads them. Nothing changes on other processors than those
        with AVX2 or AVX-512, and where torch was built without oneDNN.

        Memory: the weights of linear layers once more. They must not change from now on.
        """
        processor = torch.backends.cpu.get_cpu_capability()
        if processor not in ("AVX2", "AVX512") or not torch.backends.mkldnn.is_available():
            return
        for layer in self.encoder.modules():
            if type(layer) is nn.Linear:
                _pack_weights(layer, rows)
        # Kernels would count the denominators of what fills a sequence up.
        mixers = mixers_of_layers(self.config.encoder.mixer, self.config.encoder.num_layers)
        if all(isinstance(mixer, BidirectionalConfig) and mixer.attention == "softmax" for mixer in mixers):
            self._sequence_tokens = rows

    def hidden(self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Hidden states after the last layer, [B, L] -> [B, L, D], of this process's slice of framed sequences.

        Documents packed into a sequence are each as if alone, and only for each of them is there a bound.

        Raises: ShapeError, TokenError for tokens that are none; InputError, on every rank, for too many of them.
        """
        ops = LocalSequenceOps() if ops is None else ops
        tokens_BL = check_tokens(tokens_BL, ("batch", "length"), self.config.vocab_size, self.embedding.weight.device)
        longest = max(ops.document_places(tokens_BL.shape[1]).lengths_N, default=0)
        if longest > self.config.max_tokens:
            raise InputError(
                f"the sequence has {longest} tokens; this model reads {self.config.max_tokens} at once: cut the text"
            )
        x_BLD = self.embedding(tokens_BL)
        if self.type_embedding is not None:
            x_BLD = x_BLD + self.type_embedding.weight[0]
        h_BLD: torch.Tensor = self.encoder(x_BLD, ops)
        return h_BLD

    def hidden_together(self, texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Hidden states of whole texts of any lengths, [T] each -> [1, L, D] each with its frame.

        They are read as one packed sequence, without padding. After `pack_weights` they are read as sequences of at
        most that many tokens, filled up with a text of token 0 where a twelfth or less is missing. How a product is
        summed up, and with it the last bits of a text, may depend on how many tokens the others have.

        Raises: as `hidden`; InputError for a mixer that takes no packed documents.
        """
        read = []
        for sequence, filled in self._sequences([self.frame(text_T[None]) for text_T in texts]):
            parts = [*sequence, sequence[0].new_zeros(1, filled)] if filled else sequence
            lengths = [part_1L.shape[1] for part_1L in parts]
            ops = LocalSequenceOps(documents=tuple(accumulate(lengths[:-1], initial=0)))
            read += self.hidden(torch.cat(parts, dim=1), ops).split(lengths, dim=1)[: len(sequence)]
        return tuple(read)

    def _sequences(self, framed: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], int]]:
        """The texts of each sequence, and how many tokens fill it up."""
        most = self._sequence_tokens
        if most is None:
            yield [*framed], 0
            return
        sequences, lengths = [list[torch.Tensor]()], [0]
        for text_1L in framed:
            if sequences[-1] and lengths[-1] + text_1L.shape[1] > most:
                sequences.append([])
                lengths.append(0)
            sequences[-1].append(text_1L)
            lengths[-1] += text_1L.shape[1]
        for sequence, length in zip(sequences, lengths, strict=True):
            missing = most - length
            yield sequence, missing if 0 <= missing <= min(most // 12, self.config.max_tokens) else 0

    def pool(self, h_BLD: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """[B, L, D] of this process's slice -> [B, D] of the whole sequences, equal on all ranks.

        Cost: across ranks one all-reduce of B D elements.
        Raises: InputError for sequences without tokens, on every rank.
        """
        ops = LocalSequenceOps() if ops is None else ops
        length = h_BLD.shape[1]
        total = ops.total_length(length)
        if not total:
            raise InputError("the sequence has no tokens; give at least one")
        if self.config.pooling == "mean":
            pooled_BD = ops.sum_over_sequence(h_BLD) / total
        else:
            # Masked, not picked: ranks without the first token take part in the exchange, forward and backward.
            first_L = ops.positions(length, h_BLD.device) == 0
            pooled_BD = ops.sum_over_sequence(h_BLD * first_L[:, None])
        return F.normalize(pooled_BD, dim=-1) if self.config.normalise else pooled_BD

    def forward(self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Vectors [B, D], equal on all ranks, from this process's slice of framed sequences.

        Every rank has the whole loss: it counts once when each divides it by the number of ranks.

        Raises: as `hidden`; InputError for sequences without tokens.
        """
        return self.pool(self.hidden(tokens_BL, ops), ops)

    def encode(self, text_BT: torch.Tensor) -> torch.Tensor:
        """Vectors [B, D] of whole texts, [B, T]."""
        return self.forward(self.frame(text_BT))


def _pack_weights(layer: nn.Linear, rows: int) -> None:
    """See `TextEncoder.pack_weights`."""
    own: Any = layer
    plain, packed_OI = layer.forward, torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() != rows * layer.in_features or not torch.is_inference_mode_enabled():
            return plain(x)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed_OI, layer.bias, "none", [], "")
        return y

    own.forward = forward

"""The text encoder: one vector for a text, the mean of its hidden states or that of its first token."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import InputError
from dist_attn.model_config.encoders import TextEncoderConfig
from dist_attn.model_config.mixers.attention import BidirectionalConfig
from dist_attn.models.encoder import Encoder, check_tokens, initialise
from dist_attn.models.model import Model
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.fused_encoder import FusedEncoder, takes_encoder


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
        self.fused: FusedEncoder | None = None
        initialise(self, config.encoder.num_layers)

    @property
    def parts(self) -> list[nn.Module]:
        """The layers in order, or all of them as one where they are fused."""
        return [*self.encoder.blocks] if self.fused is None else [self.fused]

    def frame(self, text_BT: torch.Tensor) -> torch.Tensor:
        """Whole texts as sequences: prefix, text, suffix."""
        batch = text_BT.shape[0]
        # Filled in where the text is: a copy of the host's numbers would wait for all that is queued there.
        before, after = (
            [text_BT.new_full((batch, 1), token) for token in part] for part in (self.config.prefix, self.config.suffix)
        )
        return torch.cat([*before, text_BT, *after], dim=1)

    def pack_weights(self, rows: int = 0) -> None:
        """Have layers multiply by weights that are packed once, for inference on a CPU.

        Under autocast to bfloat16 a `FusedEncoder` takes the place of layers such as BERT's. Else products of linear
        layers with so many rows become oneDNN's, in nine tenths of the time of others, which are MKL's (EPYC, AVX-512).
        For each number of rows oneDNN keeps 0.3 to 1.5 MiB of code per matrix as long as the process lives, so that
        this is done for one number alone. Nothing changes on a GPU, on other processors than those with AVX2 or
        AVX-512, and where torch was built without oneDNN.

        Memory: the weights of linear layers once more. They must not change from now on.
        """
        if self.embedding.weight.device.type != "cpu":
            return
        if torch.is_autocast_enabled("cpu"):
            self.fused = _fused(self)
            return
        processor = torch.backends.cpu.get_cpu_capability()
        if not rows or processor not in ("AVX2", "AVX512") or not torch.backends.mkldnn.is_available():
            return
        for layer in self.encoder.modules():
            if isinstance(layer, nn.Linear):
                _pack_weights(layer, rows)

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
        if self.fused is not None and isinstance(ops, LocalSequenceOps) and torch.is_inference_mode_enabled():
            return cast(torch.Tensor, self.fused(tokens_BL, ops.documents or ()))
        x_BLD = self.embedding(tokens_BL)
        if self.type_embedding is not None:
            x_BLD = x_BLD + self.type_embedding.weight[0]
        h_BLD: torch.Tensor = self.encoder(x_BLD, ops)
        return h_BLD

    def hidden_together(self, texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Hidden states of whole texts of any lengths, [T] each -> [1, L, D] each with its frame.

        They are read as one packed sequence, without padding. How a product is summed up, and with it the last bits of
        a text, may depend on how many tokens the others have.

        Raises: as `hidden`; InputError for a mixer that takes no packed documents.
        """
        framed = [self.frame(text_T[None]) for text_T in texts]
        lengths = [text_1L.shape[1] for text_1L in framed]
        ops = LocalSequenceOps(documents=tuple(accumulate(lengths[:-1], initial=0)))
        read: tuple[torch.Tensor, ...] = self.hidden(torch.cat(framed, dim=1), ops).split(lengths, dim=1)
        return read

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


def fuses(config: TextEncoderConfig) -> bool:
    """Return whether this machine has a kernel for such a model's layers and what comes before them, in bfloat16."""
    own = config.encoder
    mixer, block, mlp = own.mixer, own.block, own.block.mlp
    kinds = (own.positions, block.norm.kind, block.norm_placement, block.residual, mlp.kind, mlp.activation)
    if kinds != ("learned", "layer", "post", "sequential", "plain", "gelu") or not own.embedding_norm:
        return False
    if not isinstance(mixer, BidirectionalConfig) or mixer.attention != "softmax" or mixer.relative is not None:
        return False
    return len({*mixer.qkv_sizes}) == 1 and takes_encoder(own.hidden_size, mixer.num_heads, own.mlp_size)


def _fused(model: TextEncoder) -> FusedEncoder | None:
    """The kernel of a model that `fuses`."""
    layers, mixer = model.encoder, model.config.encoder.mixer
    if not fuses(model.config) or not isinstance(mixer, BidirectionalConfig):
        return None
    if model.embedding.weight.dtype != torch.float32:  # the kernel reads the table where it lies
        return None
    positions: Any = layers.position_embedding
    types = 0 if model.type_embedding is None else model.type_embedding.weight[0]
    made = [
        ((block.mixer.qkv, block.mixer.out, block.mlp_in, block.mlp_out), (block.mixer_norm, block.mlp_norm))
        for block in list[Any](layers.blocks)
    ]
    tables = (model.embedding.weight, positions.weight + types)
    return FusedEncoder(tables, cast(nn.LayerNorm, layers.embedding_norm), made, mixer.num_heads)


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

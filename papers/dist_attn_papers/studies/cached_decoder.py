"""The baseline of decoding: exact attention with keys and values written into caches that have their full length.

The softmax mixer's own `step` returns a new state and so copies its cache for every token; who compares speeds must not
take that for what softmax costs. Here a step writes one row per layer, and each attention is one fused call.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from dist_attn.mixers.softmax import SoftmaxAttention
from dist_attn.models import LanguageModel
from dist_attn.models.blocks import Block
from dist_attn.models.encoder import sinusoidal

__all__ = ["CachedDecoder"]


class CachedDecoder:
    """Steps of a language model or encoder-decoder with softmax and sinusoids, in caches that are allocated once.

    `sources` is the length of the memory of an encoder-decoder, 0 of a language model. `own` and `memory` have keys and
    values of all layers, [layer, 2, B, H, T, K]: a head's tokens one after the other.
    """

    def __init__(self, model: Any, batch: int, length: int, sources: int = 0) -> None:
        self.model = model
        config = cast(SoftmaxAttention, self._blocks()[0][0].mixer).config
        self.heads = config.num_heads
        self.own, self.memory = (
            model.embedding.weight.new_empty((len(self._blocks()), 2, batch, self.heads, tokens, config.head_size))
            for tokens in (length, sources)
        )

    @property
    def num_bytes(self) -> int:
        """Of all caches."""
        return int(self.own.nbytes + self.memory.nbytes)

    def fill(self, seed: int) -> None:
        """As if all tokens and the memory had been seen: random numbers, those of every batch element alike."""
        generator = torch.Generator().manual_seed(seed)
        for cache in (self.own, self.memory):
            cache[:, :, 0].normal_(std=0.5, generator=generator)
            cache[:, :, 1:] = cache[:, :, :1]

    @torch.no_grad()
    def absorb(self, memory_BSD: torch.Tensor) -> None:
        """Keys and values of the memory, projected once for all steps."""
        for (_, decoder), cache_2BHSK in zip(self._blocks(), self.memory, strict=True):
            assert decoder is not None  # only an encoder-decoder has a memory
            kv_BSD = decoder.cross.kv(memory_BSD)
            cache_2BHSK.copy_(kv_BSD.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4))

    def step(self, token_B: torch.Tensor, position: int) -> torch.Tensor:
        """Feed the token that stands at `position` to each sequence: the logits of the next one, [B, vocabulary]."""
        x_BD = self.model.embedding(token_B)
        x_BD = x_BD + sinusoidal(torch.tensor([position]), x_BD.shape[1]).to(x_BD.dtype)
        for (block, decoder), own_2BHTK, memory_2BHSK in zip(self._blocks(), self.own, self.memory, strict=True):
            mixer = cast(SoftmaxAttention, block.mixer)
            qkv_3BHK = mixer.qkv(block.mixer_norm(x_BD)).unflatten(-1, (3, self.heads, -1)).transpose(0, 1)
            own_2BHTK[..., position, :] = qkv_3BHK[1:]
            x_BD = x_BD + mixer.out(_read(qkv_3BHK[0], own_2BHTK[..., : position + 1, :]))
            if decoder is not None:
                q_BHK = decoder.cross.q(decoder.cross_norm(x_BD)).unflatten(-1, (self.heads, -1))
                x_BD = x_BD + decoder.cross.out(_read(q_BHK, memory_2BHSK))
            x_BD = block.feed_forward(x_BD)
        return F.linear(self.model.norm(x_BD), self.model.embedding.weight)

    def _blocks(self) -> Sequence[tuple[Block, Any]]:
        """Every layer's self-attention and MLP, and where there is a memory what reads it."""
        if isinstance(self.model, LanguageModel):
            return [(block, None) for block in cast(list[Block], list(self.model.blocks))]
        return [(block.block, block) for block in self.model.blocks]


def _read(q_BHK: torch.Tensor, kv_2BHTK: torch.Tensor) -> torch.Tensor:
    """Attention over all of these, [B, H K]."""
    return F.scaled_dot_product_attention(q_BHK[:, :, None], kv_2BHTK[0], kv_2BHTK[1]).flatten(1)

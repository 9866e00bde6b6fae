"""The baseline of decoding: exact attention with keys and values written into caches that have their full length.

The softmax mixer's own `step` returns a new state and so copies its cache for every token; who compares speeds must not
take that for what softmax costs. Here a step writes one row per layer, and each attention is one fused call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from dist_attn.mixers.softmax import SoftmaxAttention
from dist_attn.models import EncoderDecoder, LanguageModel
from dist_attn.models.blocks import Block
from dist_attn.models.encoder import sinusoidal
from dist_attn.models.encoder_decoder import DecoderBlock

__all__ = ["Cache", "CachedDecoder"]


@dataclass(frozen=True)
class Cache:
    """Keys and values of one attention, room for all tokens: [B, H, T, K] each, a head's tokens one after the other."""

    k_BHTK: torch.Tensor
    v_BHTK: torch.Tensor

    @staticmethod
    def empty(like: torch.Tensor, batch: int, heads: int, length: int, size: int) -> "Cache":
        """Not yet written; type and device are those of `like`."""
        return Cache(*(like.new_empty((batch, heads, length, size)) for _ in range(2)))

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        return sum(t.numel() * t.element_size() for t in (self.k_BHTK, self.v_BHTK))

    def fill(self, generator: torch.Generator) -> None:
        """Random keys and values everywhere, those of every batch element alike."""
        for t in (self.k_BHTK, self.v_BHTK):
            t[0].normal_(std=0.5, generator=generator)
            t[1:] = t[:1]

    def read(self, q_BH1K: torch.Tensor, tokens: int) -> torch.Tensor:
        """Attention over the first `tokens`, [B, H K]."""
        k_BHTK, v_BHTK = self.k_BHTK[:, :, :tokens], self.v_BHTK[:, :, :tokens]
        return F.scaled_dot_product_attention(q_BH1K, k_BHTK, v_BHTK).flatten(1)


class CachedDecoder:
    """Steps of a softmax model (self and cross attention, sinusoids) in caches that are allocated once.

    `sources` is the length of the memory of an encoder-decoder, 0 of a language model.
    """

    def __init__(self, model: EncoderDecoder | LanguageModel, batch: int, length: int, sources: int = 0) -> None:
        self.model = model
        weight = model.embedding.weight
        config = cast(SoftmaxAttention, self._blocks()[0][0].mixer).config
        self.heads = config.num_heads
        sizes = (weight, batch, self.heads)
        layers = range(len(self._blocks()))
        self.own = [Cache.empty(*sizes, length, config.head_size) for _ in layers]
        self.memory = [Cache.empty(*sizes, sources, config.head_size) for _ in layers] if sources else []

    @property
    def num_bytes(self) -> int:
        """Of all caches."""
        return sum(cache.num_bytes for cache in (*self.own, *self.memory))

    def fill(self, seed: int) -> None:
        """As if all tokens and the memory had been seen."""
        generator = torch.Generator().manual_seed(seed)
        for cache in (*self.own, *self.memory):
            cache.fill(generator)

    def absorb(self, memory_BSD: torch.Tensor) -> None:
        """Keys and values of the memory, projected once for all steps."""
        for (_, decoder), cache in zip(self._blocks(), self.memory, strict=True):
            assert decoder is not None  # only an encoder-decoder has a memory
            k, v = decoder.cross.kv(memory_BSD).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
            cache.k_BHTK.copy_(k)
            cache.v_BHTK.copy_(v)

    def step(self, token_B: torch.Tensor, position: int) -> torch.Tensor:
        """Feed the token that stands at `position` to each sequence: the logits of the next one, [B, vocabulary]."""
        x_BD = self.model.embedding(token_B)
        x_BD = x_BD + sinusoidal(torch.tensor([position]), x_BD.shape[1]).to(x_BD.dtype)
        for layer, (block, decoder) in enumerate(self._blocks()):
            mixer, own = cast(SoftmaxAttention, block.mixer), self.own[layer]
            qkv_BD = mixer.qkv(block.mixer_norm(x_BD))
            q_BH1K, k_BH1K, v_BH1K = qkv_BD.unflatten(-1, (3, self.heads, 1, -1)).unbind(1)
            own.k_BHTK[:, :, position : position + 1] = k_BH1K
            own.v_BHTK[:, :, position : position + 1] = v_BH1K
            x_BD = x_BD + mixer.out(own.read(q_BH1K, position + 1))
            if decoder is not None:
                memory = self.memory[layer]
                q_BH1K = decoder.cross.q(decoder.cross_norm(x_BD)).unflatten(-1, (self.heads, 1, -1))
                x_BD = x_BD + decoder.cross.out(memory.read(q_BH1K, memory.k_BHTK.shape[2]))
            x_BD = block.feed_forward(x_BD)
        return F.linear(self.model.norm(x_BD), self.model.embedding.weight)

    def _blocks(self) -> Sequence[tuple[Block, DecoderBlock | None]]:
        """Every layer's self-attention and MLP, and where there is a memory what reads it."""
        if isinstance(self.model, LanguageModel):
            return [(block, None) for block in cast(list[Block], list(self.model.blocks))]
        return [(block.block, block) for block in cast(list[DecoderBlock], list(self.model.blocks))]

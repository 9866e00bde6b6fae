"""What attention costs in which every token sees every other: the causal kind's figures, without a state to go on from.

Letters are the glossary's: D model size, H heads, V values per head, k reach of the positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.mixers import KernelAttention, SoftmaxAttention
from dist_attn.costs.operations import relative_attention_bytes
from dist_attn.costs.relative_attention import RelativeAttention
from dist_attn.costs.whole_sequence import WholeSequence

__all__ = ["KernelOverAllKeys", "RelativeOverAllKeys", "SoftmaxOverAllKeys"]


@dataclass(frozen=True)
class KernelOverAllKeys(WholeSequence):
    """Kernel attention: one sum over all tokens, and then every token reads it."""

    causal: KernelAttention

    @property
    def parameters(self) -> int:
        """Those of the causal kind."""
        return self.causal.parameters

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return self.causal.travels

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """The sums, as the causal kind's states."""
        return self.causal.bytes_sent(lengths, rank, batch)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Without scores inside a chunk; no rank walks its keys a second time."""
        return replace(self.causal.prefill_flops(tokens), scores=0.0)


@dataclass(frozen=True)
class SoftmaxOverAllKeys(WholeSequence):
    """Exact attention over all pairs of tokens."""

    causal: SoftmaxAttention

    @property
    def parameters(self) -> int:
        """Those of the causal kind."""
        return self.causal.parameters

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return self.causal.travels

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """Heads there and back, for heads that P divides."""
        return self.causal.bytes_sent(lengths, rank, batch)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Twice the causal scores."""
        causal = self.causal.prefill_flops(tokens)
        return replace(causal, scores=2 * causal.scores)


@dataclass(frozen=True)
class RelativeOverAllKeys(WholeSequence):
    """`scaleformer` over all keys: a window on both sides."""

    causal: RelativeAttention
    projection_bias: bool = False

    @property
    def parameters(self) -> int:
        """k D numbers more, rows for later keys too; biases 3 D + H V if any."""
        bias = 3 * self.causal.hidden_size + self.causal.values if self.projection_bias else 0
        return self.causal.parameters + self.causal.reach * self.causal.hidden_size + bias

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return self.causal.travels

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """(P - 1) of the kernel sum and two windows."""
        one = self.causal
        groups = batch * one.num_heads
        return relative_attention_bytes(groups, one.head_size, one.value_size, one.reach, len(lengths), causal=False)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Without scores inside a chunk; rows and windows on both sides."""
        causal = self.causal.prefill_flops(tokens)
        width = self.causal.value_size + 1
        ahead = 2.0 * self.causal.num_heads * width * max(0, self.causal.reach - 1)
        return replace(causal, features=2 * causal.features, scores=0.0, state=causal.state + ahead)

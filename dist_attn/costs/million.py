"""What the million-scale model costs, from the few numbers of its folder's config.json; no model is built.

Parameters are exact. What depends on the tokens is what is expected where the Selector keeps its `rate` of them, kept
ones stand evenly over the sequence, and experts are chosen equally often; only `top_k` promises the first of these.
Letters are the glossary's: L tokens, N kept ones, D model size, E experts, K choices, P ranks.
"""

from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dist_attn.costs.build import Count
from dist_attn.costs.exchanges import all_gather_bytes, all_reduce_bytes
from dist_attn.costs.mixers import FLOAT_BYTES
from dist_attn.costs.operations import halo_bytes
from dist_attn.costs.whole_sequence import FourierMixing
from dist_attn.errors import ConfigError

__all__ = ["MillionCosts", "read_million_costs"]

COUNT_BYTES = 8


class _Selector(msgspec.Struct, frozen=True):
    gate: str = "straight_through"
    rate: Annotated[float, Meta(gt=0, le=1)] = 0.1
    hidden_size: Count | None = None
    most_tokens: Count | None = None


class _Router(msgspec.Struct, frozen=True):
    num_experts: Count = 1
    choices: Count = 1
    capacity_factor: Annotated[float, Meta(gt=0)] = 1.25
    most_tokens: Count | None = None


class MillionCosts(msgspec.Struct, frozen=True):
    """One sequence through `kind = "million"` as `encode` reads it: vectors of all positions, no head.

    The defaults are those of the configuration.
    """

    vocab_size: Count
    hidden_size: Count
    num_heads: Count
    mlp_size: Count
    num_layers: Count = 1
    context: Count = 1
    selector: _Selector = _Selector()
    router: _Router = _Router()
    positions: str = "sinusoidal"
    global_mixing: bool = True
    num_classes: Count | None = None
    max_tokens: Count = 1 << 20

    @property
    def parameters(self) -> int:
        """Learned numbers of the whole model."""
        size, experts, hidden = self.hidden_size, self.router.num_experts, self.selector.hidden_size
        mlp = 2 * size * self.mlp_size + self.mlp_size + size
        selector = 2 * size + (size + 1 if hidden is None else (size + 1) * hidden + hidden + 1)
        layer = 2 * size + size * experts + experts * (4 * size + 4 * size**2 + mlp)
        taps = self.context if self.context > 1 else 0
        rows = self.vocab_size + taps + (self.positions != "none") + 2  # of D numbers: those of the last norm are two
        mixing = 4 * size + mlp if self.global_mixing else 0
        return rows * size + selector + self.num_layers * layer + mixing + (size + 1) * (self.num_classes or 0)

    def kept(self, tokens: int) -> int:
        """N: at least one, and never more than `selector.most_tokens`."""
        most = self.selector.most_tokens
        return self._wanted(tokens) if most is None else min(self._wanted(tokens), most)

    def rows_of_expert(self, tokens: int) -> float:
        """Tokens that one expert attends to: an even share of the assignments, as far as there is room."""
        router = self.router
        share = router.choices * self.kept(tokens) / router.num_experts
        room = max(1, ceil(router.capacity_factor * share))
        return min(share, room if router.most_tokens is None else min(room, router.most_tokens))

    def flops(self, tokens: int, ranks: int = 1) -> float:
        """Of the rank with most experts: scores of its tokens, its experts, and mixing of its kept ones."""
        size, rows, hidden = self.hidden_size, self.rows_of_expert(tokens), self.selector.hidden_size
        score = 2.0 * size if hidden is None else 2.0 * hidden * (size + 1)
        mlp = 4.0 * size * self.mlp_size
        # One more feature of every head brings a token's weight into its scores.
        expert = rows * (8.0 * size**2 + mlp + 2.0 * rows * (2 * size + self.num_heads))
        mixing = FourierMixing(size).prefill_flops(self.kept(tokens)).total + mlp if self.global_mixing else 0.0
        of_kept = mixing + self.num_layers * 2.0 * size * self.router.num_experts
        of_experts = self.num_layers * ceil(self.router.num_experts / ranks) * expert
        return (tokens * score + self.kept(tokens) * of_kept) / ranks + of_experts

    def bytes_sent(self, tokens: int, ranks: int) -> dict[str, int]:
        """What the first rank sends, which has as many experts as any, by purpose; forward.

        Not counted: kept tokens that change ranks to be even, and the few around each cut, for up-sampling.
        """
        size, kept, experts = self.hidden_size, self.kept(tokens), self.router.num_experts
        here = ceil(experts / ranks) / experts  # the share of the experts that it has
        rows = self.rows_of_expert(tokens) * experts
        moved = rows / ranks * (1 - here) * (size + 1) + rows * here * (1 - 1 / ranks) * size
        counts = all_gather_bytes(2 * COUNT_BYTES, ranks) + all_reduce_bytes(1, FLOAT_BYTES, ranks)
        routing = all_gather_bytes(COUNT_BYTES * self.router.choices * experts, ranks)
        routing += all_reduce_bytes(2 * experts, FLOAT_BYTES, ranks)
        lengths = [kept // ranks + (rank < kept % ranks) for rank in range(ranks)]
        return {
            "edge tokens": halo_bytes(1, size, self.context, ranks),
            "scores of candidates": all_gather_bytes(FLOAT_BYTES * self._candidates(tokens, ranks), ranks),
            "counts": counts + self.num_layers * routing,
            "to experts and back": round(FLOAT_BYTES * self.num_layers * moved),
            "global mixing": FourierMixing(size).bytes_sent(lengths, 0) if self.global_mixing else 0,
        }

    def _wanted(self, tokens: int) -> int:
        return max(1, ceil(Fraction(str(self.selector.rate)) * tokens))

    def _candidates(self, tokens: int, ranks: int) -> int:
        """How many scores each rank tells the others: none where all that reach the threshold may stay."""
        reaching = tokens if self.selector.gate == "top_k" else self._wanted(tokens)
        return min(-(-reaching // ranks), self.kept(tokens)) if self.kept(tokens) < reaching else 0


def read_million_costs(folder: Path) -> MillionCosts:
    """The costs of the million-scale model in a folder.

    Raises: ConfigError for a file that cannot be read or a number that is missing.
    """
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=MillionCosts)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not the configuration of a million-scale model: {error}") from None

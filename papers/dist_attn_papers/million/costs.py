"""The cost of the million-scale model, from the few numbers of its folder's config.json; no model is built.

Parameters are exact. Figures that depend on the tokens are expectations: the Selector keeps its `rate` of them, kept
ones stand evenly over the sequence, and experts are chosen equally often; only `top_k` promises the first of these.
Letters: L tokens, N kept ones, D model size, E experts, K choices, P ranks.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

from dist_attn.costs.exchanges import all_gather_bytes, all_reduce_bytes, halo_bytes
from dist_attn.costs.models import LayerCosts
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.model_config.figures import FLOAT_BYTES
from dist_attn.model_config.folder import read_any_config
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.mixers.convolution_configs import FourierConfig

COUNT_BYTES = 8


@dataclass(frozen=True)
class MillionCosts:
    """The costs of one sequence through `kind = "million"` as `encode` reads it: vectors of all positions, no head."""

    config: MillionConfig

    @property
    def parameters(self) -> int:
        """The number of learned values in the whole model."""
        config, size, hidden = self.config, self.config.hidden_size, self.config.selector.hidden_size
        experts = config.router.num_experts
        mlp = 2 * size * config.mlp_size + config.mlp_size + size
        selector = 2 * size + (size + 1 if hidden is None else (size + 1) * hidden + hidden + 1)
        layer = 2 * size + size * experts + experts * (4 * size + 4 * size**2 + mlp)
        taps = config.context if config.context > 1 else 0
        rows = config.vocab_size + taps + (config.positions != "none") + 2  # of D numbers; two are the last norm's
        mixing = 4 * size + mlp if config.global_mixing else 0
        return rows * size + selector + config.num_layers * layer + mixing + (size + 1) * (config.num_classes or 0)

    def kept(self, tokens: int) -> int:
        """The number N of kept tokens: at least one, and never more than `selector.most_tokens`."""
        most = self.config.selector.most_tokens
        return self._wanted(tokens) if most is None else min(self._wanted(tokens), most)

    def rows_of_expert(self, tokens: int) -> float:
        """The tokens that one expert attends to: an even share of the assignments, as far as there is room."""
        router = self.config.router
        share = router.choices * self.kept(tokens) / router.num_experts
        room = max(1, ceil(router.capacity_factor * share))
        return min(share, room if router.most_tokens is None else min(room, router.most_tokens))

    def flops(self, tokens: int, ranks: int = 1) -> float:
        """The operations of the rank with most experts: scores of its tokens, its experts, mixing of its kept ones."""
        config = self.config
        size, rows, hidden = config.hidden_size, self.rows_of_expert(tokens), config.selector.hidden_size
        score = 2.0 * size if hidden is None else 2.0 * hidden * (size + 1)
        mlp = 4.0 * size * config.mlp_size
        # One more feature of every head brings a token's weight into its scores.
        expert = rows * (8.0 * size**2 + mlp + 2.0 * rows * (2 * size + config.num_heads))
        mixing = self._mixing.prefill_flops(self.kept(tokens)).total + mlp if config.global_mixing else 0.0
        of_kept = mixing + config.num_layers * 2.0 * size * config.router.num_experts
        of_experts = config.num_layers * ceil(config.router.num_experts / ranks) * expert
        return (tokens * score + self.kept(tokens) * of_kept) / ranks + of_experts

    def bytes_sent(self, tokens: int, ranks: int) -> dict[str, int]:
        """The bytes that the first rank sends forward, by purpose; it has as many experts as any.

        Not counted: kept tokens that change ranks to be even, and the few around each cut, for up-sampling.
        """
        config = self.config
        size, kept, experts = config.hidden_size, self.kept(tokens), config.router.num_experts
        here = ceil(experts / ranks) / experts  # the share of the experts that it has
        rows = self.rows_of_expert(tokens) * experts
        moved = rows / ranks * (1 - here) * (size + 1) + rows * here * (1 - 1 / ranks) * size
        counts = all_gather_bytes(2 * COUNT_BYTES, ranks) + all_reduce_bytes(1, FLOAT_BYTES, ranks)
        routing = all_gather_bytes(COUNT_BYTES * config.router.choices * experts, ranks)
        routing += all_reduce_bytes(2 * experts, FLOAT_BYTES, ranks)
        lengths = [kept // ranks + (rank < kept % ranks) for rank in range(ranks)]
        return {
            "edge tokens": halo_bytes(1, size, config.context, ranks),
            "scores of candidates": all_gather_bytes(FLOAT_BYTES * self._candidates(tokens, ranks), ranks),
            "counts": counts + config.num_layers * routing,
            "to experts and back": round(FLOAT_BYTES * config.num_layers * moved),
            "global mixing": self._mixing.bytes_sent(lengths, 0) if config.global_mixing else 0,
        }

    @property
    def _mixing(self) -> LayerCosts:
        return LayerCosts(FourierConfig(kind="fnet", hidden_size=self.config.hidden_size))

    def _wanted(self, tokens: int) -> int:
        return max(1, ceil(Fraction(str(self.config.selector.rate)) * tokens))

    def _candidates(self, tokens: int, ranks: int) -> int:
        """The number of scores each rank tells the others: none where all that reach the threshold may stay."""
        reaching = tokens if self.config.selector.gate == "top_k" else self._wanted(tokens)
        return min(-(-reaching // ranks), self.kept(tokens)) if self.kept(tokens) < reaching else 0


def read_million_costs(folder: Path) -> MillionCosts:
    """Read the costs of the million-scale model in a folder.

    Raises: ConfigError for a file that cannot be read, or that does not describe such a model.
    """
    try:
        config = read_any_config(folder)
    except ModelFolderError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(config, MillionConfig):
        raise ConfigError(f"{folder} holds a {config.kind}; needed is a million-scale model")
    return MillionCosts(config)

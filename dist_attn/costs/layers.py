"""What one layer's mixer of any kind costs, by its configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dist_attn.costs.calibration import default_exchange
from dist_attn.costs.exchanges import all_gather_bytes, all_reduce_bytes
from dist_attn.costs.operations import reshuffle_back_bytes, reshuffle_bytes
from dist_attn.costs.scans import scan_cost
from dist_attn.errors import ConfigError
from dist_attn.model_config.figures import FLOAT_BYTES, TokenFlops
from dist_attn.model_config.mixer import MixerConfig
from dist_attn.model_config.refusal import refusal


@dataclass(frozen=True)
class LayerCosts:
    """The costs that a mixer's configuration knows, and those of its traffic by the exchanges that there are."""

    config: MixerConfig

    @property
    def parameters(self) -> int:
        """Learned numbers."""
        return self.config.weights().parameters

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return self.config.traffic().travels

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Per token, on average over a sequence of `tokens`."""
        return self.config.prefill_flops(tokens, ranks)

    def state_bytes(self, position: int, batch: int = 1) -> int:
        """What a session keeps after `position` tokens, in float32."""
        return self.config.state_bytes(position, batch)

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """What a rank sends, forward, for one sequence of which each rank has so many tokens, by the usual exchange."""
        traffic, ranks = self.config.traffic(batch), len(lengths)
        gathered = traffic.gathered_bytes + traffic.edge_bytes + traffic.aside_bytes
        sent = all_gather_bytes(gathered, ranks) + all_reduce_bytes(traffic.reduced, FLOAT_BYTES, ranks)
        if traffic.scanned is not None:
            sent += scan_cost(default_exchange(ranks), traffic.scanned, ranks, rank).bytes_sent
        sent += reshuffle_bytes(lengths, traffic.columns, traffic.column_bytes, rank)
        return sent + reshuffle_back_bytes(lengths, traffic.columns_back, traffic.column_bytes, rank)


def layer_costs(values: Mapping[str, Any]) -> LayerCosts:
    """The costs of a mixer of any kind, by the values of its configuration.

    Raises: ConfigError for values that are no mixer's.
    """
    try:
        return LayerCosts(MixerConfig.model_validate(values))
    except ValidationError as error:
        where, words = refusal(error, values)
        raise ConfigError(
            f"these values are not the configuration of a mixer: {where or 'the whole'}: {words}"
        ) from None

"""Memory, bytes and time of models and exchanges in plain numbers, before anything is started; never loads torch."""

from dist_attn.costs.calibration import (
    Calibration,
    ScanTime,
    calibration_file,
    default_exchange,
    read_calibration,
    timed_exchanges,
    usual_exchange,
)
from dist_attn.costs.counts import parse_count
from dist_attn.costs.estimate import Estimate, MemoryPerRank, OutputFormat, Rates, estimate, output_bytes
from dist_attn.costs.exchanges import (
    Link,
    ScanCost,
    all_gather_bytes,
    all_gather_seconds,
    all_reduce_bytes,
    halo_bytes,
    reshuffle_back_bytes,
    reshuffle_bytes,
    scan_cost,
    scan_seconds,
)
from dist_attn.costs.models import (
    LanguageModelCosts,
    LayerCosts,
    ModelCosts,
    layer_costs,
    model_kind,
    read_any_costs,
    read_model_costs,
)
from dist_attn.model_config.figures import MOST_TURNS, ScanMessage, TokenFlops, takes_turns

__all__ = [
    "MOST_TURNS",
    "Calibration",
    "Estimate",
    "LanguageModelCosts",
    "LayerCosts",
    "Link",
    "MemoryPerRank",
    "ModelCosts",
    "OutputFormat",
    "Rates",
    "ScanCost",
    "ScanMessage",
    "ScanTime",
    "TokenFlops",
    "all_gather_bytes",
    "all_gather_seconds",
    "all_reduce_bytes",
    "calibration_file",
    "default_exchange",
    "estimate",
    "halo_bytes",
    "layer_costs",
    "model_kind",
    "output_bytes",
    "parse_count",
    "read_any_costs",
    "read_calibration",
    "read_model_costs",
    "reshuffle_back_bytes",
    "reshuffle_bytes",
    "scan_cost",
    "scan_seconds",
    "takes_turns",
    "timed_exchanges",
    "usual_exchange",
]

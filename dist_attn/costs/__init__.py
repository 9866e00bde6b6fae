"""Memory, bytes and time of models and exchanges in plain numbers, before anything is started; never loads torch."""

from dist_attn.costs.build import layer_costs
from dist_attn.costs.calibration import Calibration, ScanTime, calibration_file, default_exchange, read_calibration
from dist_attn.costs.counts import parse_count
from dist_attn.costs.dense_space import DenseStateSpace
from dist_attn.costs.estimate import Estimate, MemoryPerRank, Rates, estimate
from dist_attn.costs.exchanges import (
    Link,
    all_gather_bytes,
    all_gather_seconds,
    all_reduce_bytes,
    all_to_all_bytes,
    broadcast_bytes,
    reduce_scatter_bytes,
)
from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.input_independent import CausalConvolution, DiagonalStateSpace
from dist_attn.costs.legs import LegsMemory
from dist_attn.costs.mixers import KernelAttention, LayerCosts, MixerCosts, SoftmaxAttention
from dist_attn.costs.models import LanguageModelCosts, model_kind, read_model_costs
from dist_attn.costs.operations import (
    diagonal_scan_bytes,
    halo_bytes,
    realignment_bytes,
    relative_attention_bytes,
    relative_state_numbers,
    reshuffle_back_bytes,
    reshuffle_bytes,
)
from dist_attn.costs.output import OutputFormat, output_bytes
from dist_attn.costs.relative_attention import RelativeAttention
from dist_attn.costs.scans import ScanCost, ScanMessage, scan_cost, scan_seconds

__all__ = [
    "Calibration",
    "CausalConvolution",
    "DenseStateSpace",
    "DiagonalStateSpace",
    "Estimate",
    "KernelAttention",
    "LanguageModelCosts",
    "LayerCosts",
    "LegsMemory",
    "Link",
    "MemoryPerRank",
    "MixerCosts",
    "OutputFormat",
    "Rates",
    "RelativeAttention",
    "ScanCost",
    "ScanMessage",
    "ScanTime",
    "SoftmaxAttention",
    "TokenFlops",
    "all_gather_bytes",
    "all_gather_seconds",
    "all_reduce_bytes",
    "all_to_all_bytes",
    "broadcast_bytes",
    "diagonal_scan_bytes",
    "calibration_file",
    "default_exchange",
    "estimate",
    "halo_bytes",
    "layer_costs",
    "model_kind",
    "output_bytes",
    "parse_count",
    "read_calibration",
    "read_model_costs",
    "realignment_bytes",
    "reduce_scatter_bytes",
    "relative_attention_bytes",
    "relative_state_numbers",
    "scan_cost",
    "scan_seconds",
    "reshuffle_back_bytes",
    "reshuffle_bytes",
]

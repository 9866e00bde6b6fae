"""Rates that ranks measure before a plan: real processes, and words when they cannot."""

from pathlib import Path

import pytest

from dist_attn.costs import estimate, read_model_costs
from dist_attn.engine.rehearsal import measured_rates
from dist_attn.errors import EngineError
from tests.support.model_cases import write_config
from tests.support.models import write_small_folder


def test_ranks_measure_every_rate(tmp_path: Path) -> None:
    """Two processes find rates above 0, and the plan's reading speed is the one that they measured."""
    folder = write_small_folder(tmp_path / "small")
    costs = read_model_costs(folder)
    rates = measured_rates(folder, costs, ranks=2, block_tokens=512, read_s=0.05)
    assert min(rates.matmul_flops_per_s, rates.memory_bytes_per_s, rates.prefill_efficiency) > 0
    assert 0 < rates.link.latency_s < 60
    assert 0 < rates.link.bytes_per_s < 1e15
    alone = estimate(costs, 1 << 20, block_tokens=512, rates=rates)
    tokens_per_s = rates.matmul_flops_per_s * rates.prefill_efficiency / costs.prefill_flops(512, 1).total
    assert alone.prefill_seconds == pytest.approx((1 << 20) / tokens_per_s)


def test_ranks_that_cannot_read_are_reported(tmp_path: Path) -> None:
    """A folder without weights ends in an error that carries what the rank said."""
    folder = write_config("gated", tmp_path / "empty")
    with pytest.raises(EngineError, match=r"measuring with 1 rank\(s\) failed: .*model.safetensors"):
        measured_rates(folder, read_model_costs(folder), ranks=1, block_tokens=512, read_s=0.05)

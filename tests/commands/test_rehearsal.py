"""Rates that ranks measure before a plan: real processes that encode, and words when they cannot."""

from pathlib import Path

import pytest

from dist_attn.commands.options import PlanOptions
from dist_attn.commands.rehearsal import measured_rates
from dist_attn.costs import estimate, read_model_costs
from dist_attn.errors import EngineError
from tests.support.models import write_small_folder

pytestmark = pytest.mark.slow


def test_ranks_measure_every_rate(tmp_path: Path) -> None:
    """Two processes that encode find rates above 0, which are the whole of the plan's time."""
    folder = write_small_folder(tmp_path / "small")
    costs = read_model_costs(folder)
    rates = measured_rates(folder, costs, 512, 0.05, options=PlanOptions(tokens="1k", ranks=2))
    assert min(rates.matmul_flops_per_s, rates.memory_bytes_per_s, rates.prefill_efficiency) > 0
    assert 0 < rates.link.latency_s < 60
    assert 0 < rates.link.bytes_per_s < 1e15
    assert rates.text_tokens_per_s > 0
    assert rates.exposed_s is not None and rates.handing_s is not None
    assert min(rates.exposed_s, rates.handing_s) > 0
    planned = estimate(costs, 1 << 20, ranks=2, block_tokens=512, rates=rates)
    tokens_per_s = rates.matmul_flops_per_s * rates.prefill_efficiency / costs.prefill_flops(512, 2).total
    blocks = (1 << 20) / (2 * 512)
    each = 512 / tokens_per_s + costs.config.num_layers * rates.exposed_s + rates.handing_s
    assert planned.prefill_seconds == pytest.approx(blocks * each + (1 << 20) / rates.text_tokens_per_s)


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    """Alone, with exact attention, a rank measures its own speed over the keys of the document so far."""
    folder = write_small_folder(tmp_path / "exact", kind="softmax")
    costs = read_model_costs(folder)
    rates = measured_rates(folder, costs, 512, 0.05, options=PlanOptions(tokens="1k", ranks=1))
    assert rates.exposed_s == 0
    assert rates.prefill_efficiency > 0


def test_ranks_that_cannot_read_are_reported(tmp_path: Path) -> None:
    """A folder without weights ends in an error that carries what the rank said."""
    folder = write_small_folder(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"measuring with 1 rank\(s\) failed: .*model.safetensors"):
        measured_rates(folder, read_model_costs(folder), 512, 0.05, options=PlanOptions(tokens="1k", ranks=1))

"""The formulas of the million-scale model: parameters exactly, operations and bytes against what is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands.options import PlanOptions
from dist_attn.commands.plan import plan
from dist_attn.errors import ConfigError, InputError
from dist_attn.layout import SequenceLayout
from dist_attn.models import build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.million.costs import MillionCosts, read_million_costs
from dist_attn_papers.million.model import MillionModel
from dist_attn_papers.mixers.convolution_configs import FourierConfig

SIZES: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 16, "num_heads": 2, "mlp_size": 24}
TOP: dict[str, Any] = {"gate": "top_k", "rate": 0.25}
MUCH: dict[str, Any] = {
    "num_layers": 3, "context": 5, "num_classes": 7, "selector": {**TOP, "hidden_size": 9},
    "router": {"num_experts": 8, "choices": 2, "capacity_factor": 8.0},
}  # fmt: skip
LITTLE: dict[str, Any] = {"positions": "none", "global_mixing": False, "selector": {"most_tokens": 6, "rate": 0.5}}


def _pair(place: Path, **changes: Any) -> tuple[MillionCosts, MillionModel]:
    torch.manual_seed(0)
    model = build_model(MillionConfig.model_validate({**SIZES, **changes})).eval()
    (place / "config.json").write_text(model.config.model_dump_json())
    return read_million_costs(place), model


@pytest.mark.parametrize("changes", [{}, MUCH, LITTLE])
def test_parameters_are_the_models(changes: dict[str, Any], tmp_path: Path) -> None:
    """The learned numbers are counted exactly, and defaults are the configuration's."""
    costs, model = _pair(tmp_path, **changes)
    assert costs.parameters == sum(p.numel() for p in model.parameters())
    (tmp_path / "config.json").write_text(json.dumps({"kind": "million", **SIZES, **changes}))
    assert read_million_costs(tmp_path) == costs


@pytest.mark.parametrize("changes", [{"num_layers": 2}, {"selector": {"hidden_size": 9}}, {"global_mixing": False}])
def test_operations_are_the_counted_ones(changes: dict[str, Any], tmp_path: Path) -> None:
    """With one expert, products are those that torch counts, which sees neither fused attention nor transforms."""
    costs, model = _pair(tmp_path, **{**changes, "selector": {**TOP, **changes.get("selector", {})}})
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.spread(model.read(torch.randperm(4096)[:400], LocalSequenceOps()))
    unseen = costs.config.num_layers * 2.0 * 100**2 * (2 * 16 + 2)
    unseen += (
        100 * FourierConfig(kind="fnet", hidden_size=16).prefill_flops(100).total if costs.config.global_mixing else 0.0
    )
    assert counter.get_total_flops() == pytest.approx(costs.flops(400) - unseen, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_are_near_the_counted_ones(ranks: int, tmp_path: Path) -> None:
    """Where a fixed share is kept and experts have room, a rank sends on average what is expected, to a tenth."""
    costs, model = _pair(tmp_path, **MUCH)
    layout = SequenceLayout.even(2048, ranks)
    tokens = torch.randperm(4096, generator=torch.Generator().manual_seed(0))[:2048]

    def body(comm: Communicator) -> int:
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        with torch.no_grad():
            model.spread(model.read(tokens[slice(*layout.range(comm.rank))], ops))
        return comm.traffic.bytes_sent

    want = sum(costs.bytes_sent(2048, ranks).values())
    assert sum(run_simulated(body, ranks)) / ranks == pytest.approx(want, rel=0.1)


def test_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` prints these figures; a document longer than `max_tokens` is several sequences."""
    costs, _ = _pair(tmp_path, max_tokens=1000, selector={"rate": 0.1})
    plan(PlanOptions(tokens="2500", ranks=2, model=str(tmp_path), gflops=10, as_json=True))
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["sequences"], told["parameters"]) == ("million", 3, costs.parameters)
    assert told["expected"]["kept_tokens"] == 250 and told["expected"]["compute_seconds"] > 0
    wanted = {what: 2 * count + costs.bytes_sent(500, 2)[what] for what, count in costs.bytes_sent(1000, 2).items()}
    assert told["expected"]["bytes_sent_of_rank"] == wanted
    plan(PlanOptions(tokens="2500", ranks=2, model=str(tmp_path), as_json=False))
    assert "Expected: the Selector keeps 10.000% of the tokens" in capsys.readouterr().out


def test_what_is_not_planned_is_refused(tmp_path: Path) -> None:
    """Measured rates and exchanges of states are for language models; counts and the file are looked at."""
    _pair(tmp_path)
    for options in ({"measure": True}, {"exchange": "log_step"}):
        with pytest.raises(InputError, match="a million has no states"):
            plan(PlanOptions(tokens="2M", ranks=2, model=str(tmp_path), as_json=True, **options))
    with pytest.raises(InputError, match="ranks is 0"):
        plan(PlanOptions(tokens="2M", ranks=0, model=str(tmp_path), as_json=True))
    (tmp_path / "config.json").write_text('{"kind": "million"}')
    with pytest.raises(ConfigError, match="vocab_size"):
        read_million_costs(tmp_path)

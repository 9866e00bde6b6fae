"""The study of divisors: arms differ in what they divide by alone, and the report is made of what is done."""

import copy
import json
from typing import Any

import torch

from dist_attn.mixers.all_keys import AllKeys
from dist_attn.models import build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn_papers.mixers.cross_config import CrossConfig
from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.rfa_floors import (
    BASE,
    NORMED,
    RFA_FLOORS,
    TRIED,
    USES,
    NormedConfig,
    NormedOverAllKeys,
    NormedReadOut,
    normed_random_features,
)
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import EncoderDecoder
from tests.support.closeness import assert_close


def _without_divisor(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_divisor(value) for key, value in values.items() if key not in ("denominator", "read_out")}
    return [_without_divisor(value) for value in values] if isinstance(values, list) else values


def test_arms_differ_in_their_divisor_alone() -> None:
    """The arms of a use have the same data, steps, sizes and random features, and every divisor once."""
    jobs = RFA_FLOORS.jobs(Budget(), (0, 1))
    assert len({job.key for job in jobs}) == len(jobs) == 2 * len(USES) * len(TRIED)
    for name, use in USES.items():
        own = [job for job in jobs if job.seed == 1 and job.arm in [use.arm(name, policy) for policy in TRIED]]
        settings = [json.loads(json.dumps(job.settings)) for job in own]
        assert len({json.dumps(values) for values in settings}) == len(TRIED)
        for job, values in zip(own, settings, strict=True):
            if job.arm.endswith(NORMED) and name.startswith("gate"):
                values["model"]["mixer"]["kind"] = "rfa_gate"
        assert len({json.dumps(_without_divisor(copy.deepcopy(values))) for values in settings}) == 1


@torch.no_grad()
def test_the_normed_read_out_is_the_same_token_by_token() -> None:
    """Outputs are the gated sums of mean 0 and variance 1 over a head, as a sequence and step by step."""
    config = NormedConfig(kind="rfa_gate_normed", hidden_size=16, num_heads=2, num_random=8)
    torch.manual_seed(0)
    mixer = NormedReadOut(config).double().eval()
    x_BLD = torch.randn(1, 9, 16, dtype=torch.float64)
    got_BLD, _ = mixer(x_BLD, LocalSequenceOps())
    state, steps = mixer.initial_state(1), []
    for x_BD in x_BLD.unbind(1):
        out_BD, state = mixer.step(x_BD, state)
        steps.append(out_BD)
    assert_close(torch.stack(steps, 1), got_BLD)
    mixer.out.weight.data = torch.eye(16, dtype=torch.float64)
    heads = mixer(x_BLD, LocalSequenceOps())[0].unflatten(-1, (2, 8))
    assert float(heads.mean(-1).abs().max()) < 1e-9
    assert float((heads.var(-1, unbiased=False) - 1).abs().max()) < 1e-3


@torch.no_grad()
def test_the_normed_read_out_over_all_keys_is_the_same_query_by_query() -> None:
    """Outputs have mean 0 and variance 1 over a head, whether queries come with the keys or later."""
    config = CrossConfig(hidden_size=16, num_heads=2, attention="rfa", num_random=8)
    torch.manual_seed(0)
    attend = NormedOverAllKeys(config).double().eval()
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (5, 7, 7))
    out_BHLV, sums = attend(q, k, v, LocalSequenceOps())
    assert sums is not None
    for at in range(5):
        assert_close(attend.read(q[:, :, at : at + 1], sums), out_BHLV[:, :, at : at + 1])
    assert float(out_BHLV.mean(-1).abs().max()) < 1e-9
    assert float((out_BHLV.var(-1, unbiased=False) - 1).abs().max()) < 1e-3


def test_the_normed_read_out_is_that_of_random_features_alone() -> None:
    """A translator whose cross attention is normed keeps the softmax of its encoder."""
    jobs = RFA_FLOORS.jobs(Budget(smoke=True), (0,))
    settings = next(job.settings for job in jobs if job.arm == f"cross-{NORMED}")
    config = EncoderDecoderConfig.model_validate(json.loads(json.dumps(settings["model"])))
    with normed_random_features():
        model = build_model(config)
    assert isinstance(model, EncoderDecoder)
    kinds = {name: type(part) is NormedOverAllKeys for name, part in model.named_modules() if isinstance(part, AllKeys)}
    assert kinds == {name: "cross" in name for name in kinds} and len(kinds) == 2


def test_the_report_is_made_of_what_is_done() -> None:
    """Uses without their base arm are left out; differences are paired by seed and have the sign of what is better."""
    scores = {"cross-floor-0.03": (15.0, 17.0), f"cross-{BASE}": (12.0, 13.0), "gate-floor-0.03": (2.0, 2.1)}
    done = [
        Done(arm, seed, {"bleu": value, "perplexity": 9.0, "bits_per_byte": value}, 60.0, {}, "here")
        for arm, values in scores.items()
        for seed, value in enumerate(values)
    ]
    report = RFA_FLOORS.report(done)
    (table,) = report.tables
    rows = {row[0]: row for row in table.rows}
    assert rows["floor-0.03"][table.columns.index(f"better than {BASE} by")].startswith("3.50")
    assert list(rows) == ["floor-0.03", BASE]
    assert len(report.panels) == 1

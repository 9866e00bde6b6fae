"""RFA's Table 3: both experiments are made of jobs that can be filed, and report what is done, perhaps not all."""

import json
from dataclasses import replace

import torch

from benchmarks.papers.experiment import Budget, Done, Experiment
from benchmarks.papers.rfa_table3_speed import MIXERS, RFA_TABLE3_SPEED, NaiveSoftmaxOps, training_step
from dist_attn.models import TextClassifier, TextClassifierConfig
from dist_attn.ops import LocalSequenceOps
from tests.support.closeness import assert_close

SMALL = {
    "vocab_size": 256,
    "num_classes": 2,
    "encoder": {
        "hidden_size": 8,
        "num_layers": 1,
        "mlp_size": 8,
        "mixer": {"kind": "bidirectional", "attention": "softmax", "hidden_size": 8, "num_heads": 2},
    },
}


def _made_up(experiment: Experiment, seeds: tuple[int, ...], scores: dict[str, float]) -> list[Done]:
    jobs = experiment.jobs(Budget(), seeds)
    return [Done(job.arm, job.seed, dict(scores), 60.0, json.loads(json.dumps(job.settings)), "here") for job in jobs]


def test_the_naive_peer_computes_the_same_and_learns() -> None:
    """Scores in memory give the logits of the fused kernel, and a step of training moves the weights."""
    torch.manual_seed(0)
    model = TextClassifier(TextClassifierConfig.model_validate(SMALL))
    tokens_BL = torch.randint(0, 256, (3, 13))
    before = model(tokens_BL, NaiveSoftmaxOps())
    assert_close(before, model(tokens_BL, LocalSequenceOps()))
    training_step(model, NaiveSoftmaxOps(), tokens_BL, bf16=False)()
    assert not torch.equal(model(tokens_BL, NaiveSoftmaxOps()), before)


def test_the_speed_report_is_made_of_what_is_done() -> None:
    """Ratios are peer over ours for time and ours over peer for memory, of one precision alone too."""
    scores = {f"{arm}:{what}": value for arm in MIXERS for what, value in (("seconds", 2.0), ("peak_bytes", 4e6))}
    scores |= {f"{arm}:spread": 0.1 for arm in MIXERS}
    scores |= {"rfa-gaussian:seconds": 0.5, "rfa-gaussian:peak_bytes": 1e6}
    done = _made_up(RFA_TABLE3_SPEED, (0,), scores)
    assert [one.arm for one in done[:2]] == ["float32-512", "float32-1024"]
    report = RFA_TABLE3_SPEED.report(done[:3])
    speeds, memory = report.tables
    assert speeds.rows[1][6] == "4.00x" and speeds.rows[1][-1] == "1.1x"
    assert memory.rows[0][5] == "25%"
    assert len(RFA_TABLE3_SPEED.report(done).tables) == 4
    more_seeds = [*done, *(replace(one, seed=1) for one in done)]
    assert RFA_TABLE3_SPEED.report(more_seeds).tables == RFA_TABLE3_SPEED.report(done).tables

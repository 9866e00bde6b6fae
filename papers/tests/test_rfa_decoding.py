"""Decoding speeds: the cached baseline decodes as the product does, and whole decodes come of some steps."""

import json

import pytest
import torch

from dist_attn.models import LanguageModel, ModelState
from dist_attn_papers.studies.cached_decoder import CachedDecoder
from dist_attn_papers.tables.decoding_arms import CachedArm, StateArm, model_settings, random_source
from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.rfa_decoding import ARMS, RFA_DECODING, SMOKE_SIZES, SOFTMAX, whole_seconds
from dist_attn_papers.translation.model import DecoderState, EncoderDecoder
from tests.support.closeness import assert_close

BATCH, LENGTH, SOURCES = 3, 7, 5


def _settings(arm: str, kind: str) -> dict[str, object]:
    mixer, cross = ARMS[arm]
    return model_settings(SMOKE_SIZES, mixer, cross if kind == "conditional" else {})


@pytest.mark.parametrize("kind", ["conditional", "unconditional"])
def test_the_cached_decoder_is_the_softmax_model(kind: str) -> None:
    """Step by step the logits out of caches that are written in place are those of the product's own step."""
    sources = SOURCES if kind == "conditional" else 0
    arm = CachedArm(_settings(SOFTMAX, kind), "float32", BATCH, LENGTH, sources)
    model, tokens_LB = arm.model, torch.randint(0, SMOKE_SIZES["vocabulary"], (LENGTH, BATCH))
    cached = CachedDecoder(model, BATCH, LENGTH, sources)
    state: DecoderState | ModelState
    if isinstance(model, EncoderDecoder):
        memory_BSD = random_source(model, BATCH, sources)
        cached.absorb(memory_BSD)
        state = model.decode(tokens_LB[:0].T, memory_BSD)[1]
    else:
        state = model.initial_state(BATCH)
    with torch.no_grad():
        for position, token_B in enumerate(tokens_LB):
            if isinstance(model, EncoderDecoder):
                assert isinstance(state, DecoderState)
                expected_BV, state = model.step(token_B, state)
            else:
                assert isinstance(model, LanguageModel) and isinstance(state, ModelState)
                expected_BV, state = model.step(token_B, state)
            assert_close(cached.step(token_B, position), expected_BV)


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_decodes_greedily(name: str) -> None:
    """Every token of a whole decode is the model's best after the tokens before it, read at once."""
    arm: CachedArm | StateArm
    if name == SOFTMAX:
        arm = CachedArm(_settings(name, "conditional"), "float32", BATCH, LENGTH, SOURCES)
    else:
        arm = StateArm(_settings(name, "conditional"), "float32", BATCH, SOURCES)
    arm.steps(2, 3)  # what was decoded before is forgotten
    chosen_BL = torch.stack(arm.decode(SOURCES, LENGTH), dim=1)
    assert isinstance(arm.model, EncoderDecoder)
    fed_BL = torch.cat([torch.zeros_like(chosen_BL[:, :1]), chosen_BL[:, :-1]], dim=1)
    with torch.no_grad():
        logits_BLV, _ = arm.model.decode(fed_BL, random_source(arm.model, BATCH, SOURCES))
    assert torch.equal(chosen_BL, logits_BLV.argmax(-1))


def test_a_whole_decode_is_the_sum_of_its_steps() -> None:
    """Steps that grow evenly sum up to what their middle says; beyond them a step costs what the nearest did."""
    assert whole_seconds({0: 1.0, 4: 5.0, 10: 11.0}, 10) == pytest.approx(10 * 6.0)
    assert whole_seconds({2: 3.0, 8: 3.0}, 10) == pytest.approx(30.0)


def test_the_report_of_some_jobs() -> None:
    """Ratios at 2,048 stand beside the printed ones; jobs that are not done leave no row, and nothing names a path."""
    jobs = {job.arm: job for job in RFA_DECODING.jobs(Budget(), (0,))}
    assert all('"/' not in json.dumps(job.settings) for job in jobs.values())
    scores = {"encode_seconds": 0.0}
    for arm, seconds in zip(ARMS, (4.0, 1.0, 0.5), strict=True):
        scores |= {f"{arm}:{what}_at_{at}": seconds for what in ("seconds", "median_seconds") for at in (0, 2040)}
        scores |= {f"{arm}:{what}_bytes": 100 * seconds for what in ("held", "peak", "weight")}
        scores[f"{arm}:decode_seconds"] = seconds * 2048
    job = jobs["conditional-float32-2048"]
    report = RFA_DECODING.report([Done(job.arm, 0, scores, 1.0, dict(job.settings), "")])
    claims, speeds, *_, check = report.tables
    assert claims.rows == (
        ("conditional, float32", "12x", "4.0x, 8.0x", "less than 10 %", "25.0%, 12.5%", "25.0%, 12.5%"),
    )
    assert len(speeds.rows) == 1 and speeds.rows[0][4] == "4.00x" and check.rows[0][-1] == "+0.0%"
    assert not RFA_DECODING.report([]).tables[0].rows

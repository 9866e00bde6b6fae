"""Swaps of attention functions: which weights are copied and which drawn anew, and what the experiment says of them."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.errors import ConfigError
from dist_attn.models import build_model
from dist_attn_papers.tables import swapped_translators
from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.rfa_appendix_c import RFA_APPENDIX_C, SIZES, SOFTMAX, gaussian, of_eq_12, recovered
from dist_attn_papers.tables.runner import carry_out
from dist_attn_papers.tables.swapped_translators import (
    ATTENTION,
    SmallTranslator,
    with_attention_reset,
    with_attention_swapped,
)
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import EncoderDecoder

WORDS = [a + b + c for a in ("pr", "st", "c", "wh", "l") for b in ("in", "oa", "er", "ough") for c in ("ce", "t", "d")]
KERNEL = ("sigma_H1K", "w_HDK")


def _model(translator: SmallTranslator, seed: int) -> EncoderDecoder:
    config = EncoderDecoderConfig.model_validate(translator.model(0, Budget(smoke=True)))
    torch.manual_seed(seed)
    model = build_model(config)
    assert isinstance(model, EncoderDecoder)
    return model.eval()


@pytest.mark.parametrize(("given", "wanted"), [(SOFTMAX, gaussian()), (gaussian(), SOFTMAX)])
def test_a_swap_keeps_all_weights_but_the_kernels(given: SmallTranslator, wanted: SmallTranslator) -> None:
    """Every weight that both have is the trained one; only sigma and random vectors are the new model's own."""
    model, fresh = _model(given, 1), _model(wanted, 2)
    swapped = with_attention_swapped(model, fresh.config)
    ours, theirs = swapped.state_dict(), model.state_dict()
    assert swapped.config == fresh.config
    assert {name for name in ours if name not in theirs} == {
        name for name in ours if name.endswith(KERNEL) and wanted is not SOFTMAX
    }
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    assert all(bool((ours[name] == 1).all()) for name in ours.keys() - theirs.keys() if name.endswith("sigma_H1K"))


def test_a_swap_there_and_back_changes_nothing() -> None:
    """Softmax whose weights went through a random-feature model gives the logits that it gave before."""
    model = _model(SOFTMAX, 1)
    back = with_attention_swapped(with_attention_swapped(model, _model(gaussian(), 2).config), model.config)
    source_BS, target_BL = torch.randint(0, 300, (2, 7)), torch.randint(0, 300, (2, 5))
    assert torch.equal(back(source_BS, target_BL), model(source_BS, target_BL))


@torch.no_grad()
def test_many_features_of_eq_12_are_the_softmax_they_came_from() -> None:
    """With Eq. 12 and no floor to speak of, the swap approaches the softmax model as random features grow in number."""
    model = _model(SOFTMAX, 1)
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and name.endswith(("qkv.weight", "q.weight", "kv.weight")):
            parameter.mul_(2.0)  # attention that is not flat
    torch.manual_seed(0)
    source_BS, target_BL = torch.randint(0, 300, (2, 9)), torch.randint(0, 300, (2, 8))
    exact = model(source_BS, target_BL)

    def error(translator: SmallTranslator) -> float:
        swapped = with_attention_swapped(model, _model(translator, 2).config)
        return float((swapped(source_BS, target_BL) - exact).norm() / exact.norm())

    few, many = (error(of_eq_12(size)) for size in (32, 8192))
    assert many < 0.1 * few


def test_a_swap_of_other_models_is_refused() -> None:
    """Where more than the kernel differs, the first weight that only one model has is named."""
    wider = {**SOFTMAX.model(0, Budget(smoke=True))}
    wider["decoder"] = {**wider["decoder"], "num_layers": 3}
    with pytest.raises(ConfigError, match=r"only one of the two models has blocks\.2\.block"):
        with_attention_swapped(_model(SOFTMAX, 1), EncoderDecoderConfig.model_validate(wider))


def test_a_reset_draws_the_decoders_attention_anew() -> None:
    """The decoder's queries, keys, values and outputs are new ones of the usual size; all else is as it was."""
    model = _model(gaussian(), 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    reset = with_attention_reset(model, 5)
    before, after = model.state_dict(), reset.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("blocks.") and name.endswith(ATTENTION)}
    assert len(changed) == 5 * swapped_translators.LAYERS
    assert all(abs(float(after[name].mean())) < 0.01 for name in changed)


def test_jobs_need_the_models_that_they_begin_with() -> None:
    """Every job that begins with another's model comes after it and names it; settings name no absolute path."""
    jobs = RFA_APPENDIX_C.jobs(Budget(), (0, 1))
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys)
    for number, job in enumerate(jobs):
        assert all(key in keys[:number] for key in job.needs)
        assert bool(job.needs) == (json.loads(json.dumps(job.settings))["begins"] is not None)
        assert '"/' not in json.dumps(job.settings)
    needing = {job.key: job.needs for job in jobs}
    assert needing["softmax-as-rfa/seed-0"] == ("softmax/seed-0",)
    assert needing["rfa-as-softmax/seed-1"] == ("rfa/seed-1",)
    assert {job.arm for job in jobs if job.seed == 0} - {job.arm for job in jobs if job.seed == 1} == {
        "softmax-as-rfa-eq12"
    }


def test_sizes_are_those_of_phi() -> None:
    """An arm's sizes are the numbers of Gaussian features, twice the random vectors."""
    jobs = {job.arm: job.settings["model"]["decoder"] for job in RFA_APPENDIX_C.jobs(Budget(), (0,))}
    for cross, causal in SIZES:
        decoder = jobs[f"size-{cross}-{causal}"]
        assert (2 * decoder["cross"]["num_random"], 2 * decoder["mixer"]["num_random"]) == (cross, causal)
    assert jobs["pool-50"]["mixer"]["pool"] == jobs["pool-50"]["cross"]["pool"] == 50


@pytest.fixture
def small_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made-up sentence pairs under the names of the real ones, and small models."""
    folder = tmp_path / "data/multi30k"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for language in ("de", "en"):
        text = b"\n".join(" ".join(rng.choice(WORDS, 3 + n % 3)).encode() for n in range(200)) + b"\n"
        (folder / f"val.{language}.gz").write_bytes(gzip.compress(text))
    monkeypatch.chdir(tmp_path)
    for name, value in {"WIDTH": 16, "MLP": 16, "LAYERS": 1, "HEADS": 2, "SMOKE_VOCABULARY": 300}.items():
        monkeypatch.setattr(swapped_translators, name, value)
    monkeypatch.setattr(swapped_translators, "LONGEST", 24)
    monkeypatch.setattr(swapped_translators, "bleu_of", lambda hypotheses, references: float(len(hypotheses)))
    return folder


def test_a_chain_of_jobs_is_done(small_pairs: Path, tmp_path: Path) -> None:
    """Trained, swapped without training, reset and trained on: every job scores, and tuning keeps its losses."""
    wanted = ("softmax", "softmax-as-rfa", "tuned-rfa-reset")
    jobs = [job for job in RFA_APPENDIX_C.jobs(Budget(smoke=True), (0,)) if job.arm in wanted]
    done, left = carry_out(tmp_path / "out", jobs, lambda: False)
    assert not left
    scores = {one.arm: one.scores for one in done}
    assert all(one["perplexity"] > 1 and one["bleu"] == swapped_translators.SMOKE_PAIRS for one in scores.values())
    assert [name for name in scores["tuned-rfa-reset"] if name.startswith("loss_")] == ["loss_00001", "loss_00002"]
    assert "loss_00001" not in scores["softmax-as-rfa"]


def test_missing_pairs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Multi30k the first job says which file it needs."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"val\.de\.gz is not there"):
        carry_out(tmp_path / "out", RFA_APPENDIX_C.jobs(Budget(smoke=True), (0,))[:1], lambda: False)


def test_the_report_is_made_of_what_is_done() -> None:
    """Without any of the others an arm is reported, the rest as not measured; a diverged arm says so."""
    one = RFA_APPENDIX_C.report([Done("size-16-64", 0, {"diverged": 1.0}, 9.0, {}, "here")])
    assert ("16", "64", "does not converge", "") in one.tables[0].rows
    assert one.tables[3].rows[0][1:4] == ("not measured",) * 3
    scores = {"perplexity": 9.0, "bleu": 20.0, "loss_00010": 4.0, "loss_00020": 2.0}
    arms = [job.arm for job in RFA_APPENDIX_C.jobs(Budget(), (0,))]
    whole = RFA_APPENDIX_C.report([Done(arm, 0, dict(scores), 9.0, {}, "here") for arm in arms])
    assert whole.tables[3].rows[0] == ("RFA-Gaussian from softmax", "4.000", "3.000", "20", "9.00 (1)", "20.00 (1)")
    assert not any("not measured" in cell for table in whole.tables for row in table.rows for cell in row)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for report in (one, whole):
        for _, draw in report.panels:
            draw(figure.add_subplot())


def test_recovery_is_where_the_loss_stays_near_the_target() -> None:
    """The step from which on losses stay within 2 % of where pre-training ended; none, or no curve, is said."""
    target = [(100, 3.0), (200, 2.0)]
    assert recovered([(10, 4.0), (20, 2.03), (30, 2.01)], target) == "20"
    assert recovered([(10, 4.0), (20, 2.03), (30, 2.5), (40, 2.0)], target) == "40"
    assert recovered([(10, 4.0), (20, 2.1)], target) == "more than 20"
    assert recovered([], target) == recovered(target, []) == "not measured"

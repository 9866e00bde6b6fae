"""Language models on the books: what is held out stays out, arms differ in attention alone, scores are the text's."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn.errors import ConfigError
from dist_attn.training.config import TrainingConfig
from dist_attn.training.evaluation import score_tokens
from dist_attn_papers.tables import books
from dist_attn_papers.tables.arms import Claim, judge
from dist_attn_papers.tables.books import TRAIN, books_in_order, tokeniser_of
from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.finding import Report
from dist_attn_papers.tables.novels import DEVELOPMENT, NOVELS, TEST
from dist_attn_papers.tables.rfa_table1 import ARMS, BESIDE, RFA_TABLE1, STRONGER
from dist_attn_papers.tables.runner import carry_out

WORDS = [a + b + c for a in ("pr", "st", "c", "wh", "l") for b in ("in", "oa", "er", "ough") for c in ("ce", "t", "d")]


@pytest.fixture
def small_books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made-up books under the names of the real ones, and small models: the work of seconds."""
    folder = tmp_path / "data/books"
    folder.mkdir(parents=True)
    for number, name in enumerate(NOVELS):
        words = np.random.default_rng(number).choice(WORDS, 1500)
        (folder / name).write_text(" ".join(words))
    monkeypatch.chdir(tmp_path)
    for name, value in {"WIDTH": 16, "MLP": 16, "LAYERS": 1, "BLOCK": 32, "SMOKE_VOCABULARY": 300}.items():
        monkeypatch.setattr(books, name, value)
    return folder


def test_held_out_books_are_never_trained_on() -> None:
    """Neither held-out book is among the training books, in any order, and every order has all of them."""
    orders = [books_in_order(TRAIN, seed) for seed in range(4)]
    assert {DEVELOPMENT, TEST}.isdisjoint(TRAIN) and DEVELOPMENT != TEST
    assert all(sorted(order) == sorted(TRAIN) for order in orders)
    assert len({order[0] for order in orders[:3]}) == 3


def test_arms_differ_in_their_attention_alone() -> None:
    """Every arm has the data, optimiser, steps and sizes of softmax, and where none are named its positions."""
    jobs = {job.arm: job for job in RFA_TABLE1.jobs(Budget(), (0,))}
    assert list(jobs) == [*ARMS, *STRONGER, *BESIDE]
    softmax = jobs["softmax"].settings
    for arm, job in jobs.items():
        settings = json.loads(json.dumps(job.settings))
        assert settings["data"].pop("stateful") == ("stateful" in arm)
        settings["model"].pop("mixer")
        if arm in STRONGER:
            assert settings["model"].pop("positions") == {"sinusoidal": "sinusoidal", "relative": "none"}[arm[8:]]
            settings["model"]["positions"] = softmax["model"]["positions"]
        settings["data"]["stateful"], settings["model"]["mixer"] = False, softmax["model"]["mixer"]
        assert settings == json.loads(json.dumps(softmax))


def test_jobs_are_configurations_without_paths_of_a_machine() -> None:
    """Settings go through JSON, are accepted as a training file's sections, and name no absolute path."""
    for job in RFA_TABLE1.jobs(Budget(smoke=True), (0, 1)):
        settings = json.loads(json.dumps(job.settings))
        sections = {name: settings[name] for name in ("model", "data", "optimiser", "run")}
        sections["data"]["tokeniser"], sections["run"]["folder"] = "tokeniser", "run"
        assert TrainingConfig.model_validate(sections).run.steps == 2
        assert '"/' not in json.dumps(settings)


def test_seeds_come_one_after_the_other() -> None:
    """All arms of the paper at the first seed, then at the next; what is not in the paper comes last and once."""
    keys = [job.key for job in RFA_TABLE1.jobs(Budget(), (0, 1))]
    assert keys[: len(ARMS) + len(STRONGER)] == [f"{arm}/seed-0" for arm in (*ARMS, *STRONGER)]
    assert keys[-len(BESIDE) :] == [f"{arm}/seed-0" for arm in BESIDE]
    assert len(keys) == 2 * len(ARMS) + 2 * len(STRONGER) + len(BESIDE)


def test_a_model_is_trained_and_scored(small_books: Path, tmp_path: Path) -> None:
    """The job leaves a model whose scores are those of the model's own reading of the held-out text."""
    job = next(j for j in RFA_TABLE1.jobs(Budget(smoke=True), (1,)) if j.arm == "rfa-gate-gaussian-stateful")
    (done,), left = carry_out(tmp_path / "out", [job], lambda: False)
    assert not left
    model, tokeniser = load_model_and_tokeniser(tmp_path / "out" / job.key / "run/model")
    text = (small_books / TEST).read_bytes()[: books.SMOKE_BYTES]
    tokens = tokeniser.encode(text)
    score = score_tokens(model, tokens, len(text))
    nats = score.bits * math.log(2) - math.log(model.config.vocab_size)  # without the first token
    assert done.scores["test_perplexity"] == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-4)
    assert done.scores["test_perplexity_reset"] != done.scores["test_perplexity"]
    assert done.scores["parameters"] == sum(p.numel() for p in model.parameters())


def test_runs_share_tokens_and_tokeniser(small_books: Path, tmp_path: Path) -> None:
    """The vocabulary is made once of the training books, whatever their order, and tokens are kept once."""
    made = tmp_path / "out"
    first = tokeniser_of(made, TRAIN, 300)
    stamp = (first / "tokenizer.json").stat().st_mtime_ns
    assert tokeniser_of(made, books_in_order(TRAIN, 1), 300) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == stamp
    jobs = [job for job in RFA_TABLE1.jobs(Budget(smoke=True), (0,)) if job.arm in ("softmax", "rfa-arccos")]
    carry_out(made, jobs, lambda: False)
    assert len(list((made / "tokens").glob("*.bin"))) <= 1
    assert len(list((made / "tokens").iterdir())) > 0
    assert not [path for path in made.iterdir() if path.name.startswith("tokeniser") and "." in path.name]


def test_a_missing_book_is_named(small_books: Path, tmp_path: Path) -> None:
    """Without a book the job says which file it needs and where from."""
    (small_books / "pride_and_prejudice.txt").unlink()
    jobs = RFA_TABLE1.jobs(Budget(smoke=True), (0,))
    with pytest.raises(ConfigError, match=r"pride_and_prejudice\.txt is not there; put the novels into data/books"):
        carry_out(tmp_path / "out", jobs, lambda: False)


def _done(arm: str, seed: int, perplexity: float) -> Done:
    scores = {"parameters": 1e6, "test_perplexity": perplexity, "development_perplexity": perplexity}
    scores["test_bits_per_byte"] = perplexity / 50
    if "stateful" in arm:
        scores["test_perplexity_reset"] = perplexity + 1
    return Done(arm, seed, scores, 120.0, {}, "somewhere")


def test_the_report_is_made_of_what_is_done() -> None:
    """One job or all of them: the tables hold those that are done, and claims that need others say not measured."""
    one = RFA_TABLE1.report([_done("softmax", 0, 90.0)])
    assert [row[0] for row in one.tables[0].rows] == ["softmax"]
    assert {row[-1] for row in one.tables[1].rows} == {"not measured"}
    everything = RFA_TABLE1.report(
        [_done(arm, seed, 100.0 - 2 * number + seed) for seed in (0, 1) for number, arm in enumerate((*ARMS, *BESIDE))]
    )
    assert isinstance(everything, Report) and len(everything.tables) == 3
    assert everything.tables[0].rows[1][3] == "98.50 ± 0.71 (2)"
    assert everything.tables[2].rows[0] == ("rfa-gate-gaussian-stateful", "92.50 ± 0.71 (2)", "93.50 ± 0.71 (2)")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for _, draw in everything.panels:
        draw(figure.add_subplot())


def test_a_claim_is_judged_over_common_seeds() -> None:
    """The difference is taken seed by seed; one whose 95 % interval holds 0 is noise, one seed alone is called that."""
    done = [_done("a", seed, value) for seed, value in ((0, 10.0), (1, 11.0), (2, 9.0))]
    claim = Claim("b beats a", "b", "a", "test_perplexity")
    assert judge(done, claim)[-2:] == ("not measured", "not measured")
    assert judge([*done, _done("b", 1, 8.0)], claim)[-2:] == ("3.00 (1)", "yes (one seed)")
    clear = [*done, _done("b", 0, 9.0), _done("b", 1, 9.9), _done("b", 2, 8.1)]
    assert judge(clear, claim)[-2:] == ("1.00 ± 0.10 (3)", "yes")
    for noise in ((12.0, 9.0, 9.1), (9.8, 9.6, 7.6)):
        noisy = [*done, *(_done("b", seed, value) for seed, value in enumerate(noise))]
        assert judge(noisy, claim)[-1] == "not told from noise"

"""What random feature attention divides by, use by use: exact sums, floors and clamps, and how often they rule."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.measured import Axes, Table
from dist_attn.checkpoints import load_any_model
from dist_attn.mixers import all_keys
from dist_attn.mixers.feature_map_attention import RandomFeatureAttention
from dist_attn.mixers.heads import HeadInputs
from dist_attn.model_config.mixer import register_mixer, registered_mixers
from dist_attn.model_config.mixers.attention import AttentionConfig
from dist_attn.model_config.mixers.kernels import RandomFeatureConfig
from dist_attn.ops import Denominator, LinearState, SequenceOps
from dist_attn.text import load_tokeniser
from dist_attn.training.run_log import Metrics
from dist_attn_papers.made_up import NUM_CLASSES, VOCAB_SIZE
from dist_attn_papers.tables import books, multi30k
from dist_attn_papers.tables.arms import Claim, judge, mark_seeds, minutes_of, of_arm
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.swapped_translators import SmallTranslator
from dist_attn_papers.tables.training_job import Measure, share_tokens, training_job, with_warmup
from dist_attn_papers.translation.beam_search import BeamSpec
from dist_attn_papers.translation.model import EncoderDecoder

__all__ = ["RFA_FLOORS"]

# Of the authors' published code: max(|phi(q).z|, 1) over features 0.1 [sin, cos]; ours have length 1.
AUTHORS_EPS = 100.0
NUM_RANDOM = 64
BASE = "floor-0.3"
TINY = 1e-12  # gates near 1 make sums of all sizes
NORMED, NORMED_KIND = "layer-norm", "rfa_gate_normed"
OPTIMISER = {"kind": "muon", "learning_rate": 4e-3, "matrix_learning_rate": 3e-3, "weight_decay": 0.05}
FLOORS = (0.001, 0.01, 0.03, 0.1, 0.3)
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "exact": {"kind": "exact", "eps": 0.0},
    **{f"floor-{eps:g}": {"kind": "floor", "eps": eps} for eps in FLOORS},
    "authors-clamp": {"kind": "abs_clamp", "eps": AUTHORS_EPS / NUM_RANDOM},
}
TRIED = (*POLICIES, NORMED)


class NormedConfig(RandomFeatureConfig):
    """`rfa_gate` whose read-outs are normalised over their values and not divided."""

    kind: Literal["rfa_gate_normed"]  # type: ignore[assignment]

    @property
    def gated(self) -> bool:
        """Always."""
        return True


class NormedReadOut(RandomFeatureAttention):  # type: ignore[misc]
    """A LayerNorm of phi(q) S in the place of the division by phi(q).z."""

    def __init__(self, config: NormedConfig) -> None:
        super().__init__(config)
        self.denominator = Denominator("one")

    def attend(self, heads: HeadInputs, ops: SequenceOps, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        """The sums, each of mean 0 and variance 1 over the values of a head."""
        out, after = super().attend(heads, ops, state)
        return _normed(out), after

    def attend_step(self, heads: HeadInputs, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        """`attend` for one token."""
        out, after = super().attend_step(heads, state)
        return _normed(out), after


class NormedOverAllKeys(all_keys.RandomFeaturesOverAllKeys):
    """`NormedReadOut` over all keys: of an encoder, or of a decoder over its memory."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.denominator = Denominator("one")

    def forward(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, LinearState | None]:
        """The sums, each of mean 0 and variance 1 over the values of a head."""
        out, sums = super().forward(q_BHLK, k_BHSK, v_BHSV, ops)
        return _normed(out), sums

    def read(self, q_BHLK: torch.Tensor, sums: LinearState) -> torch.Tensor:
        """`forward` for later queries."""
        return _normed(super().read(q_BHLK, sums))


def _normed(out: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(out, out.shape[-1:], eps=TINY)


@dataclass(frozen=True)
class Use:
    """A place for random feature attention: what it is called in tables, and its score."""

    title: str
    score: str
    more: bool
    feature: Literal["gaussian", "arc_cosine"] = "gaussian"

    def arm(self, name: str, policy: str) -> str:
        """The arm of `name`, this use's key, under a policy."""
        return f"{name}-{policy}"


USES: Mapping[str, Use] = {
    "cross": Use("Cross attention: BLEU", "bleu", True),
    "encoder": Use("Encoder: accuracy on ListOps, %", "accuracy", True),
    "gate": Use("Gated language model: bits per byte", "bits_per_byte", False),
    "cross-arccos": Use("Cross attention, arc-cosine: BLEU", "bleu", True, "arc_cosine"),
    "encoder-arccos": Use("Encoder, arc-cosine: accuracy, %", "accuracy", True, "arc_cosine"),
    "gate-arccos": Use("Gated, arc-cosine: bits per byte", "bits_per_byte", False, "arc_cosine"),
}
BOOKS = books.TRAIN[:3]
TEXT = {"batch": 8, "segment": 128, "stateful": False, "validation_bytes": 20_000}
TEXT_STEPS, TEXT_VOCABULARY = 100, 1024
LISTOPS: dict[str, Any] = {
    "kind": "listops",
    "min_length": 50,
    "max_length": 150,
    "examples": 40_000,
    "validation_examples": 300,
    "batch": 16,
}
LISTOPS_STEPS = 150
PAIRS = {"batch": 64, "max_length": 80}
PAIRS_STEPS, TRANSLATED = 250, 300
SMOKE = {"validation_bytes": 2000, "examples": 40, "validation_examples": 8, "max_length": 80, "batch": 2}


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    made = {"cross": _translator, "encoder": _classifier, "gate": _language_model}
    return [
        made[name.partition("-")[0]](use.arm(name, policy), use.feature, policy, seed, budget)
        for seed in seeds
        for name, use in USES.items()
        for policy in TRIED
    ]


def _attention(feature: str, policy: str, seed: int) -> dict[str, Any]:
    """Options of attention over all keys, sizes left out; `_job_over_all_keys` has a norm replace the divisor."""
    options = {"feature": feature, "num_random": NUM_RANDOM, "seed": 1000 * seed}
    return {"attention": "rfa", **options, "denominator": dict(POLICIES.get(policy, POLICIES["exact"]))}


def normed_random_features() -> AbstractContextManager[object]:
    """Random features over all keys of models that are built inside are read by `NormedOverAllKeys`.

    Configurations and folders do not say so: such a model is for its job alone.
    """
    return patch.object(all_keys, "RandomFeaturesOverAllKeys", NormedOverAllKeys)


def _job_over_all_keys(job: Job, policy: str) -> Job:
    """The job, of the policy `layer-norm` with `normed_random_features`."""
    if policy != NORMED:
        return job

    def work(folder: Path, watch: Watch) -> Scores:
        with normed_random_features():
            return job.work(folder, watch)

    return replace(job, settings={**job.settings, "read_out": NORMED}, work=work)


def _run(steps: int) -> dict[str, Any]:
    return {"steps": steps, "log_every": 50, "evaluate_every": steps, "checkpoint_every": steps, "keep_checkpoints": 1}


def _own(data: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
    """The section [data], small for a smoke test."""
    return {**data, **{key: SMOKE[key] for key in data.keys() & SMOKE.keys() if budget.smoke}}


def _language_model(arm: str, feature: str, policy: str, seed: int, budget: Budget) -> Job:
    kind = {"kind": NORMED_KIND} if policy == NORMED else {"kind": "rfa_gate", "denominator": POLICIES[policy]}
    mixer = {"hidden_size": 128, "num_heads": 2, "feature": feature, "num_random": NUM_RANDOM, "seed": 1000 * seed}
    sizes = {"vocab_size": TEXT_VOCABULARY, "hidden_size": 128, "num_layers": 2, "mlp_size": 512}
    steps = budget.steps(TEXT_STEPS)
    train = [*BOOKS[seed % len(BOOKS) :], *BOOKS[: seed % len(BOOKS)]]
    files = {"folder": str(books.FOLDER), "train": train, "validation": books.DEVELOPMENT}
    settings = {
        "model": {"kind": "language_model", **sizes, "mixer": {**mixer, **kind}},
        "data": {**files, **_own(TEXT, budget)},
        "optimiser": with_warmup(OPTIMISER, steps),
        "run": _run(steps),
    }

    def work(folder: Path, watch: Watch) -> Scores:
        if NORMED_KIND not in registered_mixers():
            register_mixer(NormedConfig, NormedReadOut)
        made = folder.parents[1]
        share_tokens(made, folder)
        data = {**settings["data"], "tokeniser": str(books.tokeniser_of(made, BOOKS, TEXT_VOCABULARY))}
        return training_job(arm, seed, {**settings, "data": data}, _last("bits_per_byte")).work(folder, watch)

    return Job(arm, seed, settings, work)


def _classifier(arm: str, feature: str, policy: str, seed: int, budget: Budget) -> Job:
    mixer = {"kind": "bidirectional", "hidden_size": 64, "num_heads": 2, **_attention(feature, policy, seed)}
    encoder = {"hidden_size": 64, "num_layers": 2, "mlp_size": 128, "mixer": mixer, "positions": "learned"}
    encoder["max_length"] = LISTOPS["max_length"] + 1
    kind = {"kind": "text_classifier", "vocab_size": VOCAB_SIZE, "num_classes": NUM_CLASSES, "pooling": "class_token"}
    steps = budget.steps(LISTOPS_STEPS)
    sections = {
        "model": {**kind, "encoder": encoder},
        "data": _own(LISTOPS, budget),
        "optimiser": with_warmup(OPTIMISER, steps),
        "run": _run(steps),
    }
    return _job_over_all_keys(training_job(arm, seed, sections, _last("accuracy", 100.0)), policy)


def _last(score: str, unit: float = 1.0) -> Measure:
    """The numbers of the last validation."""

    def measure(model: Path, last: Metrics, watch: Watch) -> Scores:
        found = {score: unit * last[score]}
        return {**found, "guarded_share": last["guarded_share"]} if "guarded_share" in last else found

    return measure


def _translator(arm: str, feature: str, policy: str, seed: int, budget: Budget) -> Job:
    """Softmax in the encoder and among the decoder's tokens: the policy is that of cross attention alone."""
    cross = _attention(feature, policy, seed)
    model = SmallTranslator({"kind": "softmax", "short_convolution": 0}, cross).model(seed, budget)
    for part in ("encoder", "decoder"):
        model[part]["num_layers"] = 1
    steps, train = budget.steps(PAIRS_STEPS), multi30k.VALIDATION if budget.smoke else multi30k.TRAIN
    data = {"kind": "parallel_text", "folder": multi30k.FOLDER, **_own(PAIRS, budget)}
    for side, language in multi30k.SIDES:
        data |= {
            f"train_{side}": f"{train}.{language}.gz",
            f"validation_{side}": f"{multi30k.VALIDATION}.{language}.gz",
        }
    settings: dict[str, Any] = {
        "model": model,
        "data": data,
        "optimiser": with_warmup({**OPTIMISER, "final_ratio": 0.05, "betas": [0.9, 0.98]}, steps),
        "run": _run(steps),
        "translated": 3 if budget.smoke else TRANSLATED,
    }

    def work(folder: Path, watch: Watch) -> Scores:
        made = folder.parents[1]
        share_tokens(made, folder)
        tokeniser = multi30k.tokeniser_of(made, data["train_source"], model["vocab_size"])
        sections = {name: settings[name] for name in ("model", "data", "optimiser", "run")}
        sections["data"] = {**data, "tokeniser": str(tokeniser)}

        def measure(folder: Path, last: Metrics, watch: Watch) -> Scores:
            return {**_last("perplexity")(folder, last, watch), "bleu": _bleu(folder, settings["translated"])}

        return training_job(arm, seed, sections, measure).work(folder, watch)

    return _job_over_all_keys(Job(arm, seed, settings, work), policy)


def _bleu(folder: Path, pairs: int) -> float:
    """Of greedy translations of the first validation pairs."""
    model, tokeniser = load_any_model(folder), load_tokeniser(folder)
    assert isinstance(model, EncoderDecoder)  # by its configuration
    lines = (multi30k.read_lines(multi30k.VALIDATION, language)[:pairs] for _, language in multi30k.SIDES)
    sources, references = lines
    texts = multi30k.translated(
        model.eval(), tokeniser, multi30k.encoded_sources(sources, tokeniser), BeamSpec(1, 80, 0.0)
    )
    return multi30k.bleu_of(texts, [line.decode() for line in references])


def _report(done: Sequence[Done]) -> Report:
    shown = [name for name, use in USES.items() if any(one.arm.startswith(f"{name}-{BASE}") for one in done)]
    tables = tuple(_table(done, name) for name in shown)
    return Report(tables, NOTES, tuple((USES[name].title, partial(_draw, done, name)) for name in shown))


def _table(done: Sequence[Done], name: str) -> Table:
    use, rows = USES[name], []
    for policy in TRIED:
        arm = use.arm(name, policy)
        if not any(one.arm == arm for one in done):
            continue
        claim = Claim("", arm, use.arm(name, BASE), use.score, use.more)
        gain, verdict = judge(done, claim)[-2:] if policy != BASE else ("", "")
        shares = [100 * share for share in of_arm(done, arm, "guarded_share")]
        scores, guarded = mean_and_spread(of_arm(done, arm, use.score), 3), mean_and_spread(shares, 1) if shares else ""
        beside = [mean_and_spread(of_arm(done, arm, "perplexity"))] if use.score == "bleu" else []
        rows.append((policy, scores, *beside, gain, verdict, guarded, minutes_of(done, arm)))
    beside = ["perplexity"] if use.score == "bleu" else []
    columns = (use.score, *beside, f"better than {BASE} by", "is it better?", "guarded, %", "minutes")
    return Table(f"{use.title}, mean ± spread (seeds)", ("policy", *columns), tuple(rows))


def _draw(done: Sequence[Done], name: str, axes: Axes) -> None:
    use = USES[name]
    found = {policy: of_arm(done, use.arm(name, policy), use.score) for policy in TRIED}
    mark_seeds(axes, {policy: scores for policy, scores in found.items() if scores})
    axes.set_xlabel(f"{use.score}; every seed, and their mean")


NOTES = (
    "floor-X divides by max(phi(q).z, X m), m the sum of the weights of all keys; exact by phi(q).z; authors-clamp by "
    "max(|phi(q).z|, 1) as the code of the paper's authors has it (features of length 0.1 sqrt(D), here 1), arc-cosine "
    "features at the same number; layer-norm by nothing, and normalises phi(q) S over the values of a head.",
    "guarded: the share of the last validation's denominators that the policy replaced. What holds 0 in its interval "
    "of 95 % (Student's, paired by seed) is not told from noise.",
    f"Cross attention: Multi30k, German to English, 1 + 1 layers of width 128, 4 heads, D = {NUM_RANDOM}; softmax in "
    f"the encoder and among the decoder's tokens; {PAIRS_STEPS} steps of {PAIRS['batch']} pairs, greedy translations "
    f"of {TRANSLATED} validation pairs.",
    f"Encoder: {LISTOPS_STEPS} steps of {LISTOPS['batch']} expressions of {LISTOPS['min_length']} to "
    f"{LISTOPS['max_length']} symbols, 2 layers of width 64, 2 heads, D = {NUM_RANDOM}. Language model: "
    f"{TEXT_STEPS} steps of {TEXT['batch']} x {TEXT['segment']} tokens of three novels, 2 layers of width 128, 2 "
    f"heads, D = {NUM_RANDOM}, a short convolution of 4 tokens; Great Expectations is scored.",
    "One learning rate for all (Muon); one matrix a head throughout. A seed sets weights, random features and order.",
)

RFA_FLOORS = Experiment(
    "rfa-floors",
    "What should random feature attention divide by, in cross attention, in encoders and in gated language models?",
    ("papers/tests/test_rfa_floors.py", "tests/ops/test_watch.py", "tests/ops/test_linear_attention.py"),
    _jobs,
    _report,
)

"""Scaleformer's encoder-decoder on translation: linear attention everywhere, with relative positions and without."""

from collections.abc import Mapping, Sequence

from benchmarks.measured import Table
from dist_attn_papers.tables.arms import Claim, draw_seeds, judged, minutes_of, of_arm, parameters_of
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.translators import STEPS, Translator

__all__ = ["ARMS", "SCALEFORMER_TRANSLATION"]

_RELATIVE = {"attention": "scaleformer", "reach": 16}
_CAUSAL_RELATIVE = {"kind": "scaleformer", "reach": 16}
_KERNEL, _CAUSAL_KERNEL = {"attention": "elu"}, {"kind": "elu", "short_convolution": 0}
_SOFTMAX, _CAUSAL_SOFTMAX = {"attention": "softmax"}, {"kind": "softmax", "short_convolution": 0}

ARMS: Mapping[str, Translator] = {
    "scaleformer": Translator(_CAUSAL_RELATIVE, _KERNEL, _RELATIVE, positions="none"),
    "kernel-learned": Translator(_CAUSAL_KERNEL, _KERNEL, _KERNEL),
    "kernel-none": Translator(_CAUSAL_KERNEL, _KERNEL, _KERNEL, positions="none"),
    "scaleformer-softmax-cross": Translator(_CAUSAL_RELATIVE, _SOFTMAX, _RELATIVE, positions="none"),
    "softmax-learned": Translator(_CAUSAL_SOFTMAX, _SOFTMAX, _SOFTMAX),
}
WORDS = {
    "scaleformer": "elu + 1 everywhere, relative positions (k = 16) in encoder and decoder",
    "kernel-learned": "elu + 1 everywhere, learned absolute positions",
    "kernel-none": "elu + 1 everywhere, no positions",
    "scaleformer-softmax-cross": "as the first, exact attention to the source",
    "softmax-learned": "exact attention everywhere, learned absolute positions",
}
CLAIMS = (
    Claim("relative positions beat none", "scaleformer", "kernel-none", "bleu", more=True),
    Claim("relative positions beat absolute ones", "scaleformer", "kernel-learned", "bleu", more=True),
    Claim("not claimed: linear everywhere beats exact attention", "scaleformer", "softmax-learned", "bleu", more=True),
    Claim(
        "not claimed: exact attention to the source adds nothing",
        "scaleformer",
        "scaleformer-softmax-cross",
        "bleu",
        more=True,
    ),
)


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    return [model.job(arm, seed, budget) for seed in seeds for arm, model in ARMS.items()]


def _report(done: Sequence[Done]) -> Report:
    arms = [arm for arm in ARMS if of_arm(done, arm, "bleu")]
    rows = tuple(
        (
            WORDS[arm],
            parameters_of(done, arm),
            mean_and_spread(of_arm(done, arm, "bleu")) if arm in arms else "not measured",
            mean_and_spread(of_arm(done, arm, "validation_perplexity")) if arm in arms else "",
            minutes_of(done, arm),
        )
        for arm in ARMS
    )
    columns = ("attention and positions", "parameters", "BLEU", "validation perplexity", "minutes")
    tables = (
        Table("Test set 2016, mean ± spread (seeds)", columns, rows),
        judged("BLEU of the first less that of the second, by seed", done, CLAIMS),
    )
    return Report(tables, NOTES, (("BLEU", draw_seeds(done, arms, "bleu", "BLEU")),) if arms else ())


NOTES = (
    f"Multi30k, German to English, 2 + 2 layers, width 128, {STEPS} steps of 128 pairs; held equal: pairs, their "
    "order, steps, batch, schedule, optimiser, widths. Beam 4, length penalty 0.6, the last 10 checkpoints averaged; "
    "sacreBLEU.",
    "The paper proposes the model and does not train it. Attention to the source has no relative positions: those of "
    "two languages have no common axis.",
)

SCALEFORMER_TRANSLATION = Experiment(
    "scaleformer-translation",
    "Does Scaleformer's encoder-decoder, linear throughout, translate, and what do its relative positions add?",
    (
        "papers/tests/test_papers_translation.py",
        "papers/tests/test_encoder_decoder.py",
        "tests/training/test_averaging.py",
    ),
    _jobs,
    _report,
)

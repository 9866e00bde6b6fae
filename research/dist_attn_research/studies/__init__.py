"""Studies beside the targets: what models that ship can do, and how far lengths and ranks go."""

from benchmarks.studies import Study
from dist_attn_research.service import fairness
from dist_attn_research.studies import (
    chapter_retrieval,
    longest_softmax,
    peers_cpu,
    perplexity_by_position,
    scaling,
    weight_precision,
)

STUDIES = {
    study.name: study
    for study in (
        Study(
            "chapter-retrieval",
            "How well do a document's vectors find its chapters?",
            chapter_retrieval.TESTS,
            chapter_retrieval.measure,
        ),
        Study(
            "longest-softmax",
            "How long a sequence fits into 1 GB of tensors per rank, by form of attention?",
            longest_softmax.TESTS,
            longest_softmax.measure,
        ),
        Study(peers_cpu.NAME, peers_cpu.QUESTION, peers_cpu.TESTS, peers_cpu.measure),
        Study(
            "perplexity-by-position",
            "Does a model predict better the more it has read?",
            perplexity_by_position.TESTS,
            perplexity_by_position.measure,
        ),
        Study(scaling.NAME, scaling.QUESTION, scaling.TESTS, scaling.measure),
        Study(
            "service-fairness",
            "What do sessions and jobs get while others are busy?",
            fairness.TESTS,
            fairness.measure,
        ),
        Study(weight_precision.NAME, weight_precision.QUESTION, weight_precision.TESTS, weight_precision.measure),
    )
}

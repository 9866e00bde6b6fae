"""Studies beside the targets: forms of attention, what models that ship can do, how far lengths and ranks go."""

from benchmarks.cases import Case
from benchmarks.measured import Study, studies_of
from dist_attn_papers.service import fairness
from dist_attn_papers.studies import (
    attention_peers,
    chapter_retrieval,
    encoder_speed,
    longest_softmax,
    peers_cpu,
    peers_cpu_long,
    perplexity_by_position,
    scaling,
    weight_precision,
)
from dist_attn_papers.tables import scaleformer_works
from dist_attn_papers.writer import words

STUDIES: dict[str, Case | Study] = (
    attention_peers.CASES
    | scaleformer_works.CASES
    | studies_of(
        chapter_retrieval,
        encoder_speed,
        longest_softmax,
        peers_cpu,
        peers_cpu_long,
        perplexity_by_position,
        scaling,
        fairness,
        weight_precision,
        words,
    )
)

"""Studies beside the targets: what models that ship can do, and how far lengths and ranks go."""

from benchmarks.measured import studies_of
from dist_attn_research.service import fairness
from dist_attn_research.studies import (
    chapter_retrieval,
    encoder_speed,
    longest_softmax,
    peers_cpu,
    peers_cpu_long,
    perplexity_by_position,
    scaling,
    weight_precision,
)

STUDIES = studies_of(
    chapter_retrieval,
    encoder_speed,
    longest_softmax,
    peers_cpu,
    peers_cpu_long,
    perplexity_by_position,
    scaling,
    fairness,
    weight_precision,
)

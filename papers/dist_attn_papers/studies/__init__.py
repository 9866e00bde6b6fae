"""Studies of whole models, services and peers; some of them have targets in `benchmarks.targets`."""

from benchmarks.cases import Case
from benchmarks.measured import Study, studies_of
from dist_attn_papers.service import fairness
from dist_attn_papers.studies import (
    attention_peers,
    busy_ranks,
    chapter_retrieval,
    decoding,
    encoder_speed,
    longest_softmax,
    peers_cpu,
    peers_cpu_long,
    perplexity_by_position,
    prefill,
    scaling,
    weight_precision,
)
from dist_attn_papers.tables import scaleformer_works
from dist_attn_papers.writer import words

STUDIES: dict[str, Case | Study] = (
    attention_peers.CASES
    | scaleformer_works.CASES
    | studies_of(
        busy_ranks,
        chapter_retrieval,
        decoding,
        encoder_speed,
        longest_softmax,
        peers_cpu,
        peers_cpu_long,
        perplexity_by_position,
        prefill,
        scaling,
        fairness,
        weight_precision,
        words,
    )
)

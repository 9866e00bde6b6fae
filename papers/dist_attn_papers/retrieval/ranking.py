"""Scores of candidates for queries: words counted, vectors compared, both together; and how many queries are answered.

Letters: Q queries, N candidates, V words, D model width.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dist_attn.text.ranking import WordCounts
from dist_attn.text.ranking import bm25 as of_one_query

__all__ = ["Floats", "bm25", "cosines", "hits", "interval", "reciprocal_ranks", "tf_idf"]

Floats = NDArray[np.float64]
_WORD = re.compile(r"[^\W_]+")
DRAWS = 2000


def _counts(texts: Sequence[str], numbers: dict[str, int], *, learn: bool) -> list[tuple[NDArray[np.int64], Floats]]:
    """The numbers of the words of each text, and how often they stand there; other words only where it may `learn`."""
    found = []
    for text in texts:
        words = _WORD.findall(text.lower())
        known = [numbers.setdefault(w, len(numbers)) if learn else numbers[w] for w in words if learn or w in numbers]
        number, count = np.unique(np.array(known, dtype=np.int64), return_counts=True)
        found.append((number, count.astype(np.float64)))
    return found


def _dense(counts: list[tuple[NDArray[np.int64], Floats]], size: int) -> Floats:
    table = np.zeros((len(counts), size))
    for row, (number, count) in zip(table, counts, strict=True):
        row[number] = count
    return table


def bm25(queries: Sequence[str], candidates: Sequence[str]) -> tuple[Floats, Floats]:
    """The service's scores by words, and how much of a query a candidate has, [Q, N] each."""
    counted, number = [WordCounts.of([[text] for text in candidates])], len(candidates)
    scores, shares = zip(*(of_one_query(query, counted, number) for query in queries), strict=True)
    return np.stack(scores), np.stack(shares)


def tf_idf(queries: Sequence[str], candidates: Sequence[str]) -> Floats:
    """Cosines of logarithmic counts times the logarithm of how rare candidates with the word are, [Q, N]."""
    numbers: dict[str, int] = {}
    count_NV = _dense(_counts(candidates, numbers, learn=True), len(numbers))
    query_QV = _dense(_counts(queries, numbers, learn=False), len(numbers))
    rarity_V = np.log((1 + len(candidates)) / (1 + (count_NV > 0).sum(0)))
    return cosines(np.log1p(query_QV) * rarity_V, np.log1p(count_NV) * rarity_V)


def cosines(queries_QD: NDArray[np.floating], candidates_ND: NDArray[np.floating], *, centred: bool = False) -> Floats:
    """Cosines [Q, N]; centred: with the candidates' mean taken off both."""
    middle_D = candidates_ND.mean(0) if centred else np.zeros(candidates_ND.shape[1])
    query_QD, candidate_ND = (
        rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        for rows in (queries_QD - middle_D, candidates_ND - middle_D)
    )
    scores: Floats = (query_QD @ candidate_ND.T).astype(np.float64)
    return scores


def hits(scores_QN: Floats, right_QN: NDArray[np.bool_], most: int) -> Floats:
    """1 for every query with a right candidate among its `most` best, else 0: [Q]. -inf stands for no candidate."""
    best_QM = (-scores_QN).argsort(1, kind="stable")[:, :most]
    found_QN = right_QN & ~np.isneginf(scores_QN)
    return np.asarray(np.take_along_axis(found_QN, best_QM, axis=1).any(1), dtype=np.float64)


def reciprocal_ranks(scores_QN: Floats, right_QN: NDArray[np.bool_]) -> Floats:
    """1 / the rank of each query's first right candidate, 0 where it has none: [Q]."""
    order_QN = (-scores_QN).argsort(1, kind="stable")
    found_QN = np.take_along_axis(right_QN & ~np.isneginf(scores_QN), order_QN, axis=1)
    return np.where(found_QN.any(1), 1.0 / (1 + found_QN.argmax(1)), 0.0)


def interval(hit_Q: Floats, group_Q: NDArray[np.int64]) -> tuple[float, float]:
    """The middle 95 % of the mean over groups of queries that are drawn with replacement, such as documents."""
    draw = np.random.default_rng(0)
    _, number_Q = np.unique(group_Q, return_inverse=True)
    total_G, count_G = np.bincount(number_Q, hit_Q), np.bincount(number_Q)
    drawn_SG = draw.integers(0, len(count_G), (DRAWS, len(count_G)))
    means_S = total_G[drawn_SG].sum(1) / count_G[drawn_SG].sum(1)
    low, high = np.quantile(means_S, (0.025, 0.975))
    return float(low), float(high)

"""The judge of retrieval: scores are those of plain loops, intervals, and rows alone and in a stream."""

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn_papers.retrieval import cases
from dist_attn_papers.retrieval.cases import Case
from dist_attn_papers.retrieval.program import rows_of, rows_of_streams, scores_of
from dist_attn_papers.retrieval.ranking import cosines, hits, interval, tf_idf

TEXTS = ("the white whale", "a whale of a time, a whale", "the captain's leg", "chowder at the inn")
QUERIES = ("white whale whale", "inn", "nothing of these")


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def test_tf_idf_is_its_formula() -> None:
    """Every score is the cosine of logarithmic counts times rarity."""
    lists = [Counter(_words(text)) for text in TEXTS]

    def weights(counts: Counter[str]) -> dict[str, float]:
        rarity = {word: math.log((1 + len(lists)) / (1 + sum(word in other for other in lists))) for word in counts}
        known = {word for other in lists for word in other}
        return {word: math.log1p(count) * rarity[word] for word, count in counts.items() if word in known}

    scores = tf_idf(QUERIES[:2], TEXTS)
    for q, query in enumerate(QUERIES[:2]):
        own = weights(Counter(_words(query)))
        for n, counts in enumerate(lists):
            other = weights(counts)
            product = sum(value * other.get(word, 0.0) for word, value in own.items())
            lengths = math.hypot(*own.values()) * math.hypot(*other.values())
            assert scores[q, n] == pytest.approx(product / lengths)


def test_a_candidate_without_a_score_is_no_hit() -> None:
    """Among the best are those that have a score, in the order of their scores."""
    scores = np.array([[3.0, 1.0, 2.0, -np.inf]])
    assert hits(scores, np.array([[False, False, False, True]]), 4).tolist() == [0.0]
    assert hits(scores, np.array([[False, False, True, False]]), 1).tolist() == [0.0]
    assert hits(scores, np.array([[False, False, True, False]]), 2).tolist() == [1.0]


def test_cosines_may_leave_out_the_mean() -> None:
    """Centred, both sides lack the candidates' mean."""
    draw = np.random.default_rng(0)
    q, n = draw.standard_normal((2, 5)), draw.standard_normal((3, 5))
    a, b = q[1] - n.mean(0), n[2] - n.mean(0)
    assert cosines(q, n, centred=True)[1, 2] == pytest.approx(a @ b / math.hypot(*a) / math.hypot(*b))


def test_an_interval_draws_whole_groups() -> None:
    """Queries of one group are drawn together: with one group the interval is the mean, with more it holds it."""
    hit = np.array([1.0, 0.0, 1.0, 1.0])
    assert interval(hit, np.zeros(4, dtype=np.int64)) == (0.75, 0.75)
    low, high = interval(hit, np.array([0, 1, 2, 3]))
    assert low <= 0.5 < 0.75 < high


def test_rows_are_means_alone_and_in_a_stream() -> None:
    """The first text of a stream has the row that it has alone; later ones have read those before."""
    model, tokeniser = load_model_and_tokeniser("books-6m")
    no = np.zeros((0, 3), dtype=np.bool_)
    case = Case((), TEXTS[:3], no, no, np.empty(0, dtype=np.int64), streams=(slice(0, 2), slice(2, 3)))
    with torch.inference_mode():
        alone, stream = rows_of(model, tokeniser, case.candidates), rows_of_streams(model, tokeniser, case)
    np.testing.assert_allclose(alone[[0, 2]], stream[[0, 2]], atol=1e-5)
    assert np.abs(alone[1] - stream[1]).max() > 1e-2
    tokens = torch.from_numpy(tokeniser.encode(TEXTS[0].encode()).astype(np.int64))[None]
    with torch.inference_mode():
        np.testing.assert_allclose(alone[0], model.encode(tokens)[0].mean(0).numpy(), atol=1e-6)


def test_questions_are_asked_of_streams() -> None:
    """Queries that are no part of a stream are read alone, and scored against the rows of the streams."""
    nothing = np.zeros((len(QUERIES), 3), dtype=np.bool_)
    case = Case(QUERIES, TEXTS[:3], nothing, nothing, np.arange(len(QUERIES)), streams=(slice(0, 2), slice(2, 3)))
    model, tokeniser = load_model_and_tokeniser("books-6m")
    scores = scores_of(case, {"own": (model, tokeniser)})
    with torch.inference_mode():
        asked, stream = rows_of(model, tokeniser, QUERIES), rows_of_streams(model, tokeniser, case)
    np.testing.assert_array_equal(scores["own, one stream"], cosines(asked, stream, centred=True))


def test_neighbours_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five windows of a chapter the middle one has two that are right, neither of them beside it."""
    labels = ["a"] * 5
    case = cases._neighbours([f"text {n}" for n in range(5)], labels, labels)
    monkeypatch.setattr(cases, "chapters", lambda *_: case)
    apart = cases.chapters_apart(Path("books"), 5)
    assert apart.out_QN[2].tolist() == [False, True, True, True, False]
    assert apart.right_QN[2].tolist() == [True, False, False, False, True]


def test_words_and_vectors_side_by_side_are_the_mean_of_their_cosines() -> None:
    """What is no candidate stays none."""
    out_QN = np.eye(3, dtype=np.bool_)
    case = Case(TEXTS[:3], TEXTS[:3], ~out_QN, out_QN, np.arange(3))
    scores = scores_of(case, {"own": load_model_and_tokeniser("books-6m")})
    want = (scores["own, mean off"] + tf_idf(TEXTS[:3], TEXTS[:3])) / 2
    np.testing.assert_array_equal(scores["own, mean off + tf-idf"], want)
    assert np.isneginf(want[out_QN]).all()

"""POST /v1/search and /v1/rerank: what is found, by what, and what is refused."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dist_attn.text.ranking import places_of, words_of
from dist_attn.wire.messages import OpenWork
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

TEXT = "One cat sat. Two dogs ran! A red fox slept here. Dogs bark at the FOX, fox. Nobody came.\n"
SENTENCES = [TEXT[:12], TEXT[12:26], TEXT[26:48], TEXT[48:75], TEXT[75:]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def post(service: RunningService, route: str, **body: Any) -> httpx.Response:
    """The answer to a request."""
    return httpx.post(service.url + route, json=body, timeout=60)


def search(service: RunningService, query: str, documents: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The results of a search over sentences."""
    answer = post(service, "/v1/search", query=query, documents=documents, granularity="sentence", **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def bm25(query: str, passages: list[str]) -> list[float]:
    """Robertson and Zaragoza 2009, Eq. 3.15, by the plainest loop."""
    words = [re.findall(r"[a-z0-9]+", passage.lower()) for passage in passages]
    mean, scores = sum(map(len, words)) / len(words), []
    for own in words:
        score = 0.0
        for word in re.findall(r"[a-z0-9]+", query.lower()):
            having, count = sum(word in other for other in words), Counter(own)[word]
            rarity = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
            score += rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(own) / mean))
        scores.append(score)
    return scores


def test_words_are_found_and_marked(service: RunningService) -> None:
    """BM25 over the rows of all documents; ranges are those of rows, and words those of the text in any case."""
    documents = [{"id": "a", "text": TEXT}, {"text": "A fox.\n\nA cat."}]
    found = search(service, "Fox cat", documents, mode="lexical")
    passages = [*SENTENCES, "A fox.", "\n\nA cat."]
    scores = dict(enumerate(bm25("fox cat", passages)))
    wanted = [number for number in sorted(scores, key=lambda n: -scores[n]) if scores[number] > 0]
    assert [(one["document"], one["index"]) for one in found["results"]] == [
        ("a", n) if n < len(SENTENCES) else ("1", n - len(SENTENCES)) for n in wanted
    ]
    for rank, (one, number) in enumerate(zip(found["results"], wanted, strict=True), 1):
        assert one["text"] == passages[number]
        assert one["parts"]["lexical"]["rank"] == rank and one["parts"]["dense"] is None
        assert one["score"] == one["parts"]["lexical"]["score"] == pytest.approx(scores[number], abs=1e-6)
        assert {one["text"][a:b].lower() for a, b in one["words"]} <= {"fox", "cat"} and one["words"]
    last = next(one for one in found["results"] if one["index"] == 3)
    assert TEXT.encode()[last["byte_start"] : last["byte_stop"]].decode() == last["text"]
    assert found["documents"] == [
        {"id": "a", "rows": 5, "complete": True},
        {"id": "1", "rows": 2, "complete": True},
    ]
    assert found["usage"]["total_tokens"] == 0
    assert search(service, "Fox cat", [documents[0], documents[1]["text"]], mode="lexical") == found


def test_vectors_are_compared_about_their_mean(service: RunningService) -> None:
    """Dense scores are cosines of what the routes of encodings and embeddings give, less the mean row."""
    lines = post(service, "/v1/encodings", input=TEXT, granularity="sentence").text.splitlines()[:-1]
    rows = np.array([httpx.Response(200, text=line).json()["embedding"] for line in lines])
    query = np.array(post(service, "/v1/embeddings", input="fox").json()["data"][0]["embedding"])
    about, wanted = rows - rows.mean(0), query - rows.mean(0)
    cosines = about @ wanted / np.linalg.norm(about, axis=1) / np.linalg.norm(wanted)
    found = search(service, "fox", [{"text": TEXT}], mode="dense", top_k=3)
    assert len(found["results"]) == 3 and found["usage"]["total_tokens"] == len(TEXT) + 3
    for one in found["results"]:
        assert one["score"] == pytest.approx(cosines[one["index"]], abs=1e-5) and one["parts"]["lexical"] is None
    assert [one["parts"]["dense"]["rank"] for one in found["results"]] == [1, 2, 3]


def test_both_are_added(service: RunningService) -> None:
    """The score of a hybrid search is the cosine, and half the share of the query's words, by rarity, in the row."""
    found = search(service, "fox owl unheard", [{"text": TEXT}])
    assert found["mode"] == "hybrid" and len(found["results"]) == len(SENTENCES)
    words = [set(re.findall(r"[a-z]+", sentence.lower())) for sentence in SENTENCES]
    having = {word: sum(word in own for own in words) for word in ("fox", "owl", "unheard")}
    rarity = {word: math.log(1 + (len(words) - n + 0.5) / (n + 0.5)) for word, n in having.items()}
    for one in found["results"]:
        share = sum(rarity[word] for word in rarity if word in words[one["index"]]) / sum(rarity.values())
        assert (one["parts"]["lexical"] is None) == (share == 0)
        assert one["score"] == pytest.approx(one["parts"]["dense"]["score"] + share / 2, abs=2e-6)
    scores = [one["score"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert 0 < sum(one["parts"]["lexical"] is not None for one in found["results"]) < len(SENTENCES)


@pytest.mark.parametrize(
    ("query", "text", "places"),
    [
        ("\u00c9cole", "l'e\u0301cole, E\u0301COLE, \u00e9coles", [(2, 8), (10, 16)]),
        ("e\u0301cole", "\u00e9cole", [(0, 5)]),
        ("\u9996\u90fd", "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd\u3002", [(6, 7), (7, 8)]),
        ("\u30d1\u30ea", "\u6771\u4eac\u30fb\u30cf\u309a\u30ea", [(3, 5), (5, 6)]),
        ("\u00e9", "e" + 60 * "\u0316\u0301" + " \u00e9", [(0, 31), (122, 123)]),
    ],
)
def test_words_of_any_script(query: str, text: str, places: list[tuple[int, int]]) -> None:
    """Composed or not is the same, under 30 marks at most, and places are those of the text as it was sent; each Han
    character is a word.
    """
    assert set(words_of(query)) <= set(words_of(text))
    assert places_of(text, frozenset(words_of(query))) == places


def test_words_that_most_rows_have_are_not_marked(service: RunningService) -> None:
    """They tell nothing, unless the query has no others."""
    documents = [{"text": "The fox ran. The cat sat. The owl flew."}]
    for query, marked in (("the fox", {"fox"}), ("the", {"The"})):
        best = search(service, query, documents, mode="lexical", top_k=1)["results"][0]
        assert {best["text"][a:b] for a, b in best["words"]} == marked


def job(service: RunningService, text: str, query: str = "granularity=sentence") -> str:
    """The id of a job that has ended well."""
    made = httpx.post(f"{service.url}/v1/jobs?{query}", content=text, headers={"content-type": "text/plain"}).json()

    def ended() -> bool:
        return bool(httpx.get(f"{service.url}/v1/jobs/{made['id']}").json()["status"] == "succeeded")

    eventually(ended, "the job to end")
    return str(made["id"])


def test_a_job_is_searched_as_its_text_is(service: RunningService) -> None:
    """Rows that a job keeps give the results that its text gives, without being read again; deleted, it is gone."""
    name = job(service, TEXT)
    for mode in ("hybrid", "dense", "lexical"):
        for query in ("fox", "dogs that bark"):
            documents = [{"id": "x", "text": "A fox. A cat."}]
            kept = search(service, query, [{"id": "t", "job_id": name}, *documents], mode=mode)
            inline = search(service, query, [{"id": "t", "text": TEXT}, *documents], mode=mode)
            assert kept["results"] == inline["results"]
    assert search(service, "fox", [{"job_id": name}])["usage"]["total_tokens"] == len("fox")
    httpx.delete(f"{service.url}/v1/jobs/{name}")
    answer = post(service, "/v1/search", query="fox", documents=[{"job_id": name}])
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "documents"


def test_files_are_documents_too(service: RunningService) -> None:
    """A stored file is read as an encoding reads it."""
    sent = httpx.post(
        f"{service.url}/v1/files", files={"file": ("a.txt", TEXT.encode(), "text/plain")}, data={"purpose": "user_data"}
    ).json()
    by_file = search(service, "fox", [{"id": "t", "file_id": sent["id"]}])
    assert by_file["results"] == search(service, "fox", [{"id": "t", "text": TEXT}])["results"]


def test_rows_of_a_job_that_runs_are_found(tmp_path: Path) -> None:
    """What is safe is searched, and `complete` says that more will come."""
    engine = FakeEngine(credit=len(SENTENCES[0]) + len(SENTENCES[1]), stingy=True)
    with running_service(tmp_path, engine) as service:
        made = httpx.post(
            f"{service.url}/v1/jobs?granularity=sentence", content=TEXT, headers={"content-type": "text/plain"}
        ).json()
        found: dict[str, Any] = {}

        def two_rows() -> bool:
            found.update(search(service, "dogs", [{"id": "t", "job_id": made["id"]}], mode="lexical"))
            return bool(found["documents"][0]["rows"])

        eventually(two_rows, "rows of the job")
        assert found["documents"][0]["complete"] is False


def test_documents_that_cannot_be_searched(service: RunningService) -> None:
    """Each is refused by its place, before anything is encoded."""
    completion = httpx.post(f"{service.url}/v1/jobs", json={"completion": {"prompt": "a", "max_tokens": 1}}).json()
    before = len(service.engine.received)
    for documents, words in (
        ([{"text": "a", "job_id": "job_x"}], "text and job_id"),
        ([{"id": "a"}], "no text"),
        ([{"text": ""}], "documents[0].text is empty"),
        ([{"text": "a"}, {"text": "b"}, {"text": "c", "id": "1"}], "two documents have the id '1'"),
        ([{"job_id": completion["id"]}], "draws a completion"),
        (["a"] * 257, "one search takes 256 documents at most, not 257; put short texts into one"),
        ([], "documents is empty"),
        (["a", "<html><p>b"], "documents[1].text: this is a web page"),
        ([{"file_id": "file_x"}], "documents[0].file_id: "),
        (["a", {"id": 7, "text": "cat"}], "documents[1].id cannot be 7"),
        ([{"txt": "cat"}], "'documents[0].txt'; did you mean text? known are file_id, id, job_id, text"),
        ([5], "documents[0] cannot be 5: a text or a JSON object was needed"),
    ):
        answer = post(service, "/v1/search", query="a", documents=documents)
        assert answer.status_code in (400, 404, 415) and words in answer.json()["detail"], answer.text
        assert answer.json()["error"]["param"] == "documents" and "hint" not in answer.json()
    new = service.engine.received[before:]
    assert not any(isinstance(message, OpenWork) and message.kind == "encoding" for message in new)


def test_too_many_rows_or_bytes_are_refused(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request encodes so much and no more, and searches so much."""
    name = job(service, TEXT)
    for limit, documents in (
        ("ENCODED_BYTES", [{"text": TEXT}, {"text": TEXT}]),
        ("ENCODED_ROWS", [{"text": TEXT}]),
        ("SEARCHED_BYTES", [{"job_id": name}]),
        ("SEARCHED_ROWS", [{"job_id": name}]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"dist_attn_service.search.service.{limit}", 4 if "ROWS" in limit else len(TEXT) - 1)
            for mode in ("lexical", "dense"):
                answer = post(service, "/v1/search", query="a", documents=documents, granularity="sentence", mode=mode)
                assert answer.status_code == 413 and answer.json()["error"]["param"] == "documents", answer.text


def test_long_rows_are_counted_in_parts_and_told_by_their_beginning(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's text is in memory a part at a time, which changes no score, and an answer has its first bytes."""
    documents = [{"text": TEXT * 3}, {"text": "fox " * 9 + "éé " * 20 + " no fox."}]
    for granularity in ("document", "sentence"):
        asked = {"query": "fox dogs", "documents": documents, "granularity": granularity, "mode": "lexical"}
        whole = post(service, "/v1/search", **asked).json()["results"]
        assert not any(one["text_cut"] for one in whole)
        with monkeypatch.context() as patch:
            patch.setattr("dist_attn_service.search.passages.TEXT_AT_ONCE", 21)
            patch.setattr("dist_attn_service.search.service.TOLD_BYTES", 37)
            found = post(service, "/v1/search", **asked).json()["results"]
        for one, same in zip(found, whole, strict=True):
            cut = same["byte_stop"] - same["byte_start"] > 37
            wanted = same["text"].encode()[:37].decode(errors="ignore") if cut else same["text"]
            words = [[start, stop] for start, stop in same["words"] if stop <= len(wanted)]
            assert one == {**same, "text": wanted, "text_cut": cut, "words": words}
    assert whole != found


def test_searches_at_once_share_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes over the limit beside another's documents is told when to come back, and is done after it; what no
    search may have does not count.
    """
    monkeypatch.setattr("dist_attn_service.search.service.ENCODED_BYTES", 2 * len(TEXT))
    engine = FakeEngine(credit=4, stingy=True)
    asked = {"query": "a", "documents": [{"text": TEXT}]}
    body = json.dumps(asked).encode()
    head = "POST /v1/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with running_service(tmp_path, engine, search_memory_bytes=len(TEXT) + 100) as service:
        with service.connect() as first:
            first.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            eventually(lambda: engine.open_count, "the first search to be under way")
            for route, more in (("/v1/search", asked), ("/v1/rerank", {"query": "a", "documents": ["b" * 100]})):
                answer = post(service, route, **more)
                assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
                assert "searched documents of requests under way hold" in answer.json()["detail"]
            assert post(service, "/v1/search", query="a", documents=[{"text": 3 * TEXT}]).status_code == 413
        eventually(lambda: not engine.open_count, "the first search to be given up")
        answer = post(service, "/v1/search", **asked, mode="lexical")
        assert answer.status_code == 200, answer.text


def test_short_documents_are_in_the_engine_together(tmp_path: Path) -> None:
    """As the inputs of embeddings are, so that it can read them at once."""
    body = json.dumps({"query": "a", "documents": ["abc"] * 20}).encode()
    head = (
        f"POST /v1/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    with running_service(tmp_path, FakeEngine(credit=1, stingy=True)) as service, service.connect() as client:
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        eventually(lambda: service.engine.open_count == 20, "all documents to be in the engine")
        assert service.engine.open_count == 20


def test_a_deadline_ends_a_search(tmp_path: Path) -> None:
    """An engine that takes too long is not waited for."""
    with running_service(tmp_path, FakeEngine(credit=1, stingy=True)) as service:
        began = time.monotonic()
        answer = post(service, "/v1/search", query="a", documents=[{"text": TEXT}], deadline_seconds=0.5)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
        assert time.monotonic() > began + 0.4
        eventually(lambda: not service.engine.open_count, "the engine to be told")


# ---- reranking -----------------------------------------------------------------------------------


def test_documents_in_order_of_their_cosines(service: RunningService) -> None:
    """Texts or objects, under either name; each result says its place, and its text where that is asked for."""
    texts = ["zebra", "a", "fox fox"]
    vectors = [one["embedding"] for one in post(service, "/v1/embeddings", input=["fox", *texts]).json()["data"]]
    unit = np.array(vectors) / np.linalg.norm(vectors, axis=1, keepdims=True)
    answer = post(service, "/v1/rerank", query="fox", documents=[texts[0], {"text": texts[1]}, texts[2]]).json()
    assert sorted(one["index"] for one in answer["results"]) == [0, 1, 2] and answer["model"] == "tiny"
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(float(unit[0] @ unit[1 + one["index"]]), abs=1e-5)
    told = post(service, "/v1/rerank", query="fox", texts=texts, top_n=2, return_documents=True).json()["results"]
    assert [one["document"] for one in told] == [{"text": texts[one["index"]]} for one in told] and len(told) == 2
    assert answer["usage"]["total_tokens"] == len("fox") + sum(map(len, texts))


def test_rerankings_by_other_clients(service: RunningService) -> None:
    """Cohere's second path answers as the first; for `texts` /rerank has the list of text-embeddings-inference."""
    texts = ["zebra", "a", "fox fox"]
    answer = post(service, "/v1/rerank", query="fox", documents=texts).json()
    for route in ("/v2/rerank", "/rerank"):
        assert post(service, route, query="fox", documents=texts, max_tokens_per_doc=4096).json() == answer
    theirs = {"raw_scores": False, "truncate": True, "return_text": True}
    assert post(service, "/rerank", query="fox", texts=texts, **theirs).json() == [
        {"index": one["index"], "score": one["relevance_score"], "text": texts[one["index"]]}
        for one in answer["results"]
    ]
    short = post(service, "/v2/rerank", query="fox", documents=["zebra", "fox fox"], max_tokens_per_doc=3).json()
    assert short["usage"]["total_tokens"] == 9
    assert short["results"] == post(service, "/v1/rerank", query="fox", documents=["zeb", "fox"]).json()["results"]


def test_rerankings_that_are_refused(service: RunningService) -> None:
    """By the name of what is wrong."""
    for body, param in (
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": ["a"], "texts": ["a"]}, "texts"),
        ({"query": "a", "documents": ["a", ""]}, "documents"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents"),
        ({"query": " ", "documents": ["a"]}, "query"),
    ):
        answer = post(service, "/v1/rerank", **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert "documents[0].text is missing" in post(service, "/v1/rerank", query="a", documents=[{"title": "b"}]).text

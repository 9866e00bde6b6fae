"""POST /v1/estimate: each figure by what is known best, with its source; nothing is started for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service.engine.workload import EngineSpeed, TextRatio, Workload
from msgspec.structs import replace

from dist_attn.shipped import resolve_model_folder
from dist_attn.text import train_bpe
from tests.support.fake_engine import HIDDEN, FakeEngine
from tests.support.fake_sessions import MANIFEST
from tests.support.models import write_small_folder
from tests.support.raw_http import CHUNKED, TEXT, chunk, head
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.waiting import eventually

PROSE = "The whale went down, and the ship went on towards the south, as she had done all day. " * 60


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with a tokeniser of several bytes per token and a model whose costs have formulas."""
    folder = tmp_path_factory.mktemp("service")
    corpus = folder / "corpus.txt"
    corpus.write_text(PROSE)
    model = model_folder(folder, train_bpe([corpus], 290))
    with running_service(folder, FakeEngine(keep=False), model=model) as running:
        yield running


def ask(service: RunningService, **body: Any) -> dict[str, Any]:
    """A whole estimate."""
    answer = httpx.post(f"{service.url}/v1/estimate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    for name in ("tokens", "seconds", "total_seconds"):
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    return found


def test_tokens_come_from_what_is_known_best(service: RunningService) -> None:
    """Given, counted, by a sample, by what was read lately, or by a short text; known exactly only in the first two."""
    exact = httpx.post(f"{service.url}/tokenize", json={"prompt": PROSE * 4}).json()["count"]
    assert ask(service, tokens=5)["tokens"] == {"value": 5, "low": 5, "high": 5, "source": "given"}
    assert ask(service, input=PROSE * 4)["tokens"]["value"] == exact
    sampled = ask(service, input=PROSE, bytes=len(PROSE) * 4)["tokens"]
    assert sampled["source"] == "sample" and sampled["low"] <= exact <= sampled["high"]
    unread = ask(service, bytes=len(PROSE) * 4)["tokens"]
    assert unread["source"] == "planned" and unread["high"] >= 2.9 * unread["low"]
    httpx.post(f"{service.url}/v1/encodings", content=(PROSE * 50).encode()).raise_for_status()
    lately = ask(service, bytes=len(PROSE) * 4)["tokens"]
    assert lately["source"] == "measured" and lately["low"] <= exact <= lately["high"]
    assert not service.engine.received


def test_rows_and_bytes_by_format(service: RunningService) -> None:
    """The rows of the granularity that is asked for; npy's bytes are exact, Arrow's within a few percent."""
    data = ("x" * 3000).encode()
    tokens = httpx.post(f"{service.url}/tokenize", json={"prompt": data.decode()}).json()["count"]
    for granularity, window, rows in (("token", 7, tokens), ("window", 7, -(-tokens // 7)), ("document", 7, 1)):
        told = ask(service, input=data.decode(), granularity=granularity, window=window)
        assert told["rows"] == rows and told["ranks"] == 1
        query = f"granularity={granularity}&window={window}"
        for form in ("npy", "arrow"):
            answer = httpx.post(f"{service.url}/v1/encodings?{query}&format={form}", content=data)
            size = len(answer.content)
            assert told["output_bytes"][form] == (size if form == "npy" else pytest.approx(size, abs=800, rel=0.05))
    assert HIDDEN and ask(service, tokens=10, max_tokens=5)["rows"] == 0


def test_memory_by_formulas_where_there_are_some(service: RunningService, tmp_path: Path) -> None:
    """A language model has its memory per rank; a kind without formulas has none, and says what else is unknown."""
    assert ask(service, tokens=1000)["memory_bytes_per_rank"] is None
    with running_service(tmp_path, model=write_small_folder(tmp_path / "small")) as other:
        told = ask(other, tokens=100_000)
        memory = told["memory_bytes_per_rank"]
        after = sum(memory[name] for name in ("weights", "state", "activations", "exchange"))
        assert memory["peak"] == memory["process"] + max(memory["loading"], after)
        assert told["seconds"]["source"] == "planned" and "no document has been read" in told["notes"][0]
        assert ask(other, tokens=100_000, max_tokens=1000)["seconds"]["value"] > told["seconds"]["value"]


def test_a_stream_encoder_has_formulas_too(tmp_path: Path) -> None:
    """Memory and seconds of an encoding; it writes nothing, so a completion is refused."""
    with running_service(tmp_path, model=resolve_model_folder("minilm-stream")) as service:
        told = ask(service, tokens=100_000)
        assert told["memory_bytes_per_rank"]["weights"] == 92_826_884 and told["seconds"]["value"] > 0
        answer = httpx.post(f"{service.url}/v1/estimate", json={"tokens": 9, "max_tokens": 1})
        assert answer.status_code == 400 and "writes none" in answer.json()["detail"]


def test_memory_is_that_of_weights_as_they_are_held(tmp_path: Path) -> None:
    """An engine that holds its weights in fewer bits needs less for them."""
    model, held = write_small_folder(tmp_path / "small"), {}
    for precision in ("float32", "int8"):
        engine = FakeEngine(keep=False)
        engine.manifest = replace(MANIFEST, model=replace(MANIFEST.model, weight_precision=precision))
        with running_service(tmp_path / precision, engine, model=model) as service:
            held[precision] = ask(service, tokens=1000)["memory_bytes_per_rank"]["weights"]
    assert held["int8"] < 0.6 * held["float32"]


def test_what_is_under_way_is_waited_for(tmp_path: Path) -> None:
    """A document that is under way adds what it has left, or as much as the new one has where nobody knows."""
    engine = FakeEngine(keep=False, credit=50_000)
    with running_service(tmp_path, engine) as service:
        httpx.post(f"{service.url}/v1/encodings", content=b"x" * 400_000).raise_for_status()
        assert ask(service, tokens=1000)["queue_seconds"] == 0
        with service.connect() as connection:
            connection.sendall(head("/v1/encodings", TEXT, CHUNKED) + chunk(b"abc"))
            eventually(lambda: engine.open_count == 1, "the other document")
            told = ask(service, tokens=10_000_000)
            assert told["seconds"]["source"] == "measured"
            assert told["queue_seconds"] == pytest.approx(told["seconds"]["value"], rel=0.5)
        eventually(lambda: engine.open_count == 0, "it to be gone")


def test_sizes_that_contradict_each_other(service: RunningService) -> None:
    """None at all, tokens beside another, a sample longer than its text, rows that nobody can count before they are
    read: a 400 each, that names the field.
    """
    for body, param in (
        ({}, "bytes"),
        ({"tokens": 5, "bytes": 5}, "bytes"),
        ({"tokens": 5, "input": "a"}, "input"),
        ({"bytes": 2, "input": "abc"}, "bytes"),
        ({"bytes": 2, "granularity": "sentence"}, "granularity"),
    ):
        answer = httpx.post(f"{service.url}/v1/estimate", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_speed_is_that_of_the_time_in_which_work_waits() -> None:
    """Pauses of a client do not count, several documents at once count together, and the newest half minute decides."""
    now = [0.0]
    speed = EngineSpeed(lambda: now[0])
    speed.done(10_000)  # nobody waits: it says nothing
    assert speed.measured() is None
    for pause in range(20):
        now[0] += pause
        with speed.waiting(), speed.waiting():
            now[0] += 1.0
            speed.done(600)
            speed.done(400)
    found = speed.measured()
    assert found is not None and found.tokens_per_second == pytest.approx(1000) and found.spread == 0.05
    for _ in range(100):
        with speed.waiting():
            now[0] += 1.0
            speed.done(2000)
    faster = speed.measured()
    assert faster is not None and faster.tokens_per_second == pytest.approx(2000)


def test_ratios_have_their_uncertainty() -> None:
    """Texts that differ have wider bounds than texts that are alike; a token per byte has none."""
    alike, mixed, single = TextRatio(), TextRatio(), TextRatio()
    for number in range(20):
        alike.add(25, 100)
        mixed.add(20 + 10 * (number % 2), 100)
        single.add(100, 100)
    spreads = [found.spread for ratio in (single, alike, mixed) if (found := ratio.measured()) is not None]
    assert spreads[0] == 0 < spreads[1] < spreads[2] < 0.2
    assert TextRatio().measured() is None and alike.measured(least_bytes=10_000) is None


def test_long_documents_take_turns() -> None:
    """A new one waits for as many tokens of each as it has itself at most, whatever else they have left."""
    load = Workload()
    with load.document(tokens=1000) as first, load.document():
        first.done(400)
        assert load.tokens_before(100) == 200 and load.tokens_before(10_000) == 600 + 10_000
    assert load.tokens_before(100) == 0

"""Encodings as NDJSON, Arrow and npy over real sockets: the same numbers, told apart when they are not complete."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.encodings.encoding_run import RowBlock
from dist_attn_service.encodings.formats import RowsAhead, choose_format, make_format

from dist_attn_api.types import EncodingSummary, Usage
from tests.support.fake_engine import HIDDEN, FakeEngine
from tests.support.raw_http import CHUNKED, TEXT, Answer, chunk, head, lines_of, send_in_background
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

ROUTE = "/v1/encodings"
TEXT_OF_ROWS = b"It was the best of times, it was the worst of times. " * 40
NDJSON, ARROW, NPY = "application/x-ndjson", "application/vnd.apache.arrow.stream", "application/x-npy"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def ask(service: RunningService, query: str, data: bytes = TEXT_OF_ROWS, **headers: str) -> httpx.Response:
    """A whole answer of 200."""
    answer = httpx.post(f"{service.url}{ROUTE}?{query}", content=data, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def batches(data: bytes) -> list[tuple[Any, dict[bytes, bytes]]]:
    """The record batches of an Arrow stream, each with its metadata."""
    ipc = pytest.importorskip("pyarrow.ipc", reason="pip install -e '.[arrow]'")
    reader, found = ipc.open_stream(io.BytesIO(data)), []
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return found
        found.append((batch, dict(metadata or {})))


def of_arrow(data: bytes) -> tuple[list[list[int]], np.ndarray]:
    """Index and ranges of each row, and the vectors."""
    rows = [row for batch, _ in batches(data) for row in batch.to_pylist()]
    names = ("index", "start", "stop", "byte_start", "byte_stop")
    return [[row[name] for name in names] for row in rows], np.array([row["embedding"] for row in rows], np.float32)


@pytest.mark.parametrize("granularity", ["token", "window", "document"])
@pytest.mark.parametrize("first", [0, 3, 10_000])
def test_all_formats_have_the_same_numbers(service: RunningService, granularity: str, first: int) -> None:
    """Lines, Arrow and npy hold the same rows with the same bits, from whichever row on; the summary counts all."""
    query = f"window=64&granularity={granularity}"
    whole = lines_of(ask(service, query).content)
    rows, lines = whole[:-1], lines_of(ask(service, f"{query}&from_row={first}").content)
    assert lines == [*rows[first:], whole[-1]]
    vectors = np.array([row["embedding"] for row in rows], np.float32).reshape(-1, HIDDEN)
    npy = ask(service, f"{query}&format=npy&from_row={first}")
    assert npy.headers["content-type"] == NPY and int(npy.headers["content-length"]) == len(npy.content)
    np.testing.assert_array_equal(np.load(io.BytesIO(npy.content)), vectors[first:], strict=True)
    arrow = ask(service, f"{query}&format=arrow&from_row={first}")
    ranges, same = of_arrow(arrow.content)
    assert ranges == [[r[n] for n in ("index", "start", "stop", "byte_start", "byte_stop")] for r in rows[first:]]
    np.testing.assert_array_equal(same.reshape(-1, HIDDEN), vectors[first:])


def test_a_complete_arrow_stream_says_so(service: RunningService) -> None:
    """The schema says what was asked for; the last batch has no rows and the summary, behind it stands the marker."""
    ipc = pytest.importorskip("pyarrow.ipc", reason="pip install -e '.[arrow]'")
    data = ask(service, "format=arrow&window=100&pooling=last").content
    last, metadata = batches(data)[-1]
    summary = json.loads(metadata[b"dist_attn.summary"])
    assert last.num_rows == 0 and summary["tokens"] == len(TEXT_OF_ROWS) and summary["rows"] == 22
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    about = ipc.open_stream(io.BytesIO(data)).schema.metadata
    assert (about[b"window"], about[b"pooling"], about[b"model"]) == (b"100", b"last", b"tiny")


def test_accept_chooses_where_no_format_is_named(service: RunningService) -> None:
    """The type with the highest weight of those that are offered; `format` wins; unknown types change nothing."""
    assert choose_format(None, "text/html, */*") == "ndjson"
    assert choose_format(None, f"{NPY};q=0.5, {ARROW};q=0.9, {NDJSON};q=nonsense") == "arrow"
    assert choose_format(None, f"{ARROW};q=0, {NPY}") == "npy"
    assert choose_format("ndjson", ARROW) == "ndjson"
    assert ask(service, "", Accept=NPY).headers["content-type"] == NPY
    assert ask(service, "format=ndjson", Accept=NPY).headers["content-type"] == NDJSON


def test_npy_needs_the_length_beforehand(service: RunningService) -> None:
    """A chunked body is refused with words about npy, before any of it is read; JSON has a length."""
    answer = httpx.post(f"{service.url}{ROUTE}?format=npy", content=iter([b"abc"]))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "format"
    assert "Content-Length" in answer.json()["error"]["message"]
    whole = httpx.post(service.url + ROUTE, json={"input": "abc", "format": "npy", "granularity": "token"})
    assert np.load(io.BytesIO(whole.content)).shape == (3, HIDDEN)


def test_npy_of_too_many_tokens(tmp_path: Path) -> None:
    """What would wait for its count beyond the limit is refused with 413 before the head."""
    with running_service(tmp_path, npy_tokens=100) as service:
        answer = httpx.post(f"{service.url}{ROUTE}?format=npy", content=b"x" * 101)
        assert answer.status_code == 413 and "format=arrow" in answer.json()["error"]["message"]
        assert ask(service, "format=npy", b"x" * 100).headers["content-type"] == NPY


def test_arrow_where_pyarrow_is_missing(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 that says what to install; the other formats do not need it."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = httpx.post(f"{service.url}{ROUTE}?format=arrow", content=b"abc")
    assert answer.status_code == 400 and "pip install -e '.[arrow]'" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "format"
    ask(service, "format=npy")


@pytest.mark.parametrize("form", ["arrow", "npy"])
def test_a_failure_after_the_head_breaks_off(tmp_path: Path, form: str) -> None:
    """The body has no end, so that every client of HTTP notices; Arrow names the error in its last batch."""
    pytest.importorskip("pyarrow", reason="pip install -e '.[arrow]'")
    with running_service(tmp_path, FakeEngine(fail_at=5000)) as service:
        answer = b""
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", f"{service.url}{ROUTE}?window=10&format={form}", content=b"x" * 60_000) as stream,
        ):
            assert stream.status_code == 200
            for piece in stream.iter_raw():
                answer += piece
        eventually(lambda: service.engine.open_count == 0, "the engine to be done with it")
        if form == "arrow":
            *_, (last, metadata) = batches(answer)
            assert last.num_rows == 0 and json.loads(metadata[b"dist_attn.error"])["code"] == "engine_failed"
            assert not answer.endswith(b"\xff\xff\xff\xff\0\0\0\0")
        service.engine.fail_at = None
        assert ask(service, f"window=10&format={form}").content
        assert not [line for line in service.log_lines() if line["level"] == "error"]


def test_a_broken_body_never_looks_complete(service: RunningService) -> None:
    """A body that stops being HTTP after the head: no last chunk and no marker, so nobody takes it for whole."""
    pytest.importorskip("pyarrow", reason="pip install -e '.[arrow]'")
    with service.connect() as connection:
        connection.sendall(head(f"{ROUTE}?window=4&format=arrow", TEXT, CHUNKED) + chunk(b"abcd"))
        answer = Answer(connection)
        assert answer.read_head() == 200
        answer.read_chunk()
        connection.sendall(b"not a chunk\r\n")
        with pytest.raises((EOFError, ValueError)):
            answer.read_body()
    eventually(lambda: service.engine.open_count == 0, "the cancel")


def test_rows_that_nobody_reads_wait_on_disk(tmp_path: Path) -> None:
    """A client that sends all before it reads gets all as Arrow too, and the disk is given back."""
    data = np.random.default_rng(2).integers(97, 123, 400_000, dtype=np.uint8).tobytes()
    pytest.importorskip("pyarrow", reason="pip install -e '.[arrow]'")
    with running_service(tmp_path, FakeEngine(keep=False), spool_memory_bytes=100_000) as service:
        with service.connect() as connection:
            request = head(f"{ROUTE}?window=40&format=arrow", TEXT, f"Content-Length: {len(data)}")
            sender = send_in_background(connection, request + data)
            sender.join(60)
            assert not sender.is_alive()
            eventually(lambda: service.engine.open_count == 0, "the engine to have done it all")
            answer = Answer(connection)
            assert answer.read_head() == 200
            ranges, vectors = of_arrow(answer.read_body())
        assert [row[0] for row in ranges] == list(range(10_000)) and vectors.shape == (10_000, HIDDEN)
        assert list((tmp_path / "data/spool").iterdir()) == []


@pytest.mark.parametrize("rows", [1, 3])
def test_npy_never_holds_another_number_of_rows_than_its_header(rows: int) -> None:
    """More rows than promised, or fewer at the end, are a failure of the engine."""
    form = make_format("npy", RowsAhead(dim=2, count=2))
    summary = EncodingSummary(tokens=4, rows=2, model="m", usage=Usage(prompt_tokens=4, total_tokens=4))
    block = RowBlock(0, np.zeros((rows, 4), np.int64), np.zeros((rows, 2), np.float32))
    with pytest.raises(EngineFailure, match="2 were due"):
        form.rows(block)
        form.end(summary)

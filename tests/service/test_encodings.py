"""POST /v1/encodings over real sockets: both directions at once, nothing lost, nothing left behind."""

import gzip
import json
import socket
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dist_attn.text import documents, train_bpe
from dist_attn.wire.messages import Tokens
from tests.support.fake_engine import FakeEngine, row_vector
from tests.support.raw_http import CHUNKED, LAST_CHUNK, TEXT, Answer, chunk, head, lines_of, send_in_background
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.waiting import eventually

ROUTE = "/v1/encodings"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def encode(service: RunningService, content: Any, query: str = "", **headers: str) -> list[dict[str, Any]]:
    """The lines of a complete encoding."""
    answer = httpx.post(f"{service.url}{ROUTE}?{query}", content=content, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return lines_of(answer.content)


def check_rows(lines: list[dict[str, Any]], data: bytes, every: int, pooling: str = "mean") -> None:
    """The lines are exactly the rows of `data` under the byte tokeniser, then the summary."""
    tokens = np.frombuffer(data, np.uint8).astype(np.int32)
    starts = list(range(0, len(data), every))
    assert lines[-1] == {
        "object": "encoding.summary",
        "tokens": len(data),
        "rows": len(starts),
        "model": "tiny",
        "usage": {"prompt_tokens": len(data), "total_tokens": len(data)},
    }
    assert len(lines) == len(starts) + 1
    for index, (line, start) in enumerate(zip(lines, starts, strict=False)):
        stop = min(start + every, len(data))
        vector = line.pop("embedding")
        assert line == {"index": index, "start": start, "stop": stop, "byte_start": start, "byte_stop": stop}
        np.testing.assert_array_equal(np.array(vector, np.float32), row_vector(tokens[start:stop], pooling))


@pytest.mark.parametrize(
    ("query", "every", "pooling"),
    [
        ("", 512, "mean"),
        ("granularity=window&window=7", 7, "mean"),
        ("window=100&pooling=last", 100, "last"),
        ("granularity=token", 1, "mean"),
        ("granularity=document&format=ndjson&model=tiny", 1 << 40, "mean"),
        ("window=1000000", 1_000_000, "mean"),
    ],
)
def test_rows_are_those_that_were_asked_for(service: RunningService, query: str, every: int, pooling: str) -> None:
    """Tokens, windows or the document, mean or last: each row once, in order, with token and byte ranges."""
    data = b"It was the best of times. " * 77
    check_rows(encode(service, data, query), data, every, pooling)


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("text/plain", "añ€😀".encode() * 500),
        ("text/plain; charset=UTF-8", b"plain"),
        ("application/octet-stream", bytes(range(256)) * 10),
        ("", bytes(range(256))),
    ],
)
def test_bodies_are_text_or_any_bytes(service: RunningService, content_type: str, data: bytes) -> None:
    """UTF-8 as text/plain, anything as octet-stream or without a type (as `curl -T` sends it)."""
    headers = {"Content-Type": content_type} if content_type else {}
    cuts = [data[i : i + 3] for i in range(0, len(data), 3)]
    check_rows(encode(service, iter(cuts), **headers), data, 512)


def test_json_carries_text_and_options(service: RunningService) -> None:
    """The JSON form gives the same rows."""
    answer = httpx.post(
        service.url + ROUTE, json={"input": "abc" * 50, "window": 10, "pooling": "last", "model": "tiny"}
    )
    check_rows(lines_of(answer.content), b"abc" * 50, 10, "last")


def test_byte_ranges_follow_the_tokens(tmp_path: Path) -> None:
    """With tokens of several bytes the byte ranges tile the input and hold exactly the tokens of the row."""
    text = ("the whale the ship the sea añ€ " * 300).encode()
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(text)
    tokeniser = train_bpe([corpus], 290)
    folder = model_folder(tmp_path, tokeniser)
    with running_service(tmp_path, model=folder) as service:
        lines = encode(service, iter([text[i : i + 11] for i in range(0, len(text), 11)]), "window=9")
    lengths = np.cumsum(tokeniser.byte_lengths(tokeniser.encode(text)))
    assert lines[-1]["tokens"] == len(lengths) < len(text)
    rows = lines[:-1]
    assert rows[0]["byte_start"] == 0 and rows[-1]["byte_stop"] == len(text)
    for before, after in pairwise(rows):
        assert before["byte_stop"] == after["byte_start"]
    assert all(row["byte_stop"] == lengths[row["stop"] - 1] for row in rows)


def test_rows_arrive_before_the_upload_ends(service: RunningService) -> None:
    """The answer begins while the body is still being sent, and goes on with every piece."""
    with service.connect() as connection:
        connection.sendall(head(ROUTE + "?window=16", TEXT, CHUNKED))
        answer = Answer(connection)
        body = b""
        for piece in range(20):
            connection.sendall(chunk(b"abcdefghijklmnop"))
            if piece == 0:
                assert answer.read_head() == 200
            body += answer.read_chunk()
            assert body.count(b"\n") == piece + 1
        connection.sendall(LAST_CHUNK)
        body += answer.read_body()
    check_rows(lines_of(body), b"abcdefghijklmnop" * 20, 16)


@pytest.mark.slow
def test_a_client_that_sends_all_before_it_reads_gets_all(tmp_path: Path) -> None:
    """Rows that nobody takes wait on the disk, input that the engine does not take yet too; nothing is lost."""
    data = np.random.default_rng(1).integers(97, 123, 800_000, dtype=np.uint8).tobytes()
    engine = FakeEngine(keep=False, paused=True)
    with running_service(tmp_path, engine, spool_memory_bytes=100_000) as service, service.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sendall(head(ROUTE + "?window=40", TEXT, f"Content-Length: {len(data)}"))
        sender = send_in_background(connection, data)
        eventually(lambda: not engine.paused or bool(service.engine_port.waiting), "the request to reach the engine")
        service.engine_port.resume()
        sender.join(60)
        assert not sender.is_alive()
        eventually(lambda: engine.open_count == 0, "the engine to have done it all")
        answer = Answer(connection)
        assert answer.read_head() == 200
        check_rows(lines_of(answer.read_body()), data, 40)
        assert list((tmp_path / "data/spool").iterdir()) == []


def test_expect_100_continue_is_answered(service: RunningService) -> None:
    """A client that waits for the go-ahead gets it at once, then its 200."""
    with service.connect() as connection:
        connection.settimeout(5)
        connection.sendall(head(ROUTE, TEXT, "Content-Length: 600", "Expect: 100-continue"))
        answer = Answer(connection)
        assert answer.read_head() == 100
        connection.sendall(b"x" * 600)
        assert answer.read_head() == 200
        assert lines_of(answer.read_body())[-1]["tokens"] == 600


def test_a_refusal_comes_instead_of_the_go_ahead(service: RunningService) -> None:
    """A request that is refused by its head alone gets the error, not 100."""
    with service.connect() as connection:
        connection.sendall(head(ROUTE + "?window=0", TEXT, "Content-Length: 600", "Expect: 100-continue"))
        assert Answer(connection).read_head() == 400


@pytest.mark.parametrize("extra", [["Content-Length: 0"], [CHUNKED], []])
def test_an_empty_body_is_refused(service: RunningService, extra: list[str]) -> None:
    """No bytes: 400 before any head of success, however the emptiness was sent."""
    with service.connect() as connection:
        connection.sendall(head(ROUTE, TEXT, *extra) + (LAST_CHUNK if CHUNKED in extra else b""))
        answer = Answer(connection)
        assert answer.read_head() == 400
        assert b'"empty_input"' in answer.read_body()


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"abc\xffdef", 3),
        (b"ab\xe2\x82", 2),
        (b"ab\xe2\x82z", 2),
        (b"\xc0\xaf", 0),
        (b"ok\xed\xa0\x80", 2),
    ],
)
def test_invalid_utf8_names_the_byte(service: RunningService, data: bytes, offset: int) -> None:
    """Text that is not UTF-8 is refused with the offset of the first wrong byte; in the first piece by status 400."""
    answer = httpx.post(service.url + ROUTE, content=data, headers={"Content-Type": "text/plain"})
    error = answer.json()["error"] if answer.status_code == 400 else lines_of(answer.content)[-1]["error"]
    assert error["code"] == "invalid_utf8" and f"byte {offset} " in error["message"]


def test_invalid_utf8_later_is_the_last_line(service: RunningService) -> None:
    """After the head the error is the last line; rows before it stay, the offset is that of the whole body."""
    with service.connect() as connection:
        connection.sendall(head(ROUTE + "?window=10", TEXT, CHUNKED) + chunk(b"0123456789" * 3 + b"\xe2\x82"))
        answer = Answer(connection)
        assert answer.read_head() == 200
        body = answer.read_chunk()
        connection.sendall(chunk(b"\xac fine") + chunk(b"bad \xff"))
        body += answer.read_body()
    lines = lines_of(body)
    assert lines[0]["index"] == 0 and lines[-1]["object"] == "error"
    assert "byte 42 " in lines[-1]["error"]["message"]
    eventually(lambda: service.engine.open_count == 0, "the engine to be told")


def test_a_client_that_still_sends_reads_its_error(tmp_path: Path) -> None:
    """After an error the rest of the body is read and dropped, so a client that sends first still sees the error."""
    with running_service(tmp_path, FakeEngine(fail_at=5000)) as service:
        lines = encode(service, iter([b"x" * 60_000] * 100), **{"Content-Type": "text/plain"})
        assert lines[-1]["error"]["code"] == "engine_failed" and "rank 1 died" in lines[-1]["error"]["message"]
        service.engine.fail_at = None
        check_rows(encode(service, b"again"), b"again", 512)


@pytest.mark.parametrize("reset", [False, True])
def test_a_body_that_breaks_off_cancels(tmp_path: Path, reset: bool) -> None:
    """A client that leaves in mid-body: the controller hears Cancel, the spools are given back, the service goes on."""
    engine = FakeEngine(credit=1000)
    with running_service(tmp_path, engine, spool_memory_bytes=1000) as service:
        with service.connect() as connection:
            connection.sendall(head(ROUTE + "?window=4", TEXT, "Content-Length: 5000000", "x-request-id: broke"))
            connection.sendall(b"x" * 1_500_000)
            assert Answer(connection).read_head() == 200
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: len(engine.cancelled) == 1 and engine.open_count == 0, "the cancel")
        assert service.logged("broke")["reason"] == "client_gone"
        assert list((tmp_path / "data/spool").iterdir()) == []
        check_rows(encode(service, b"again"), b"again", 512)


def test_broken_chunking_is_an_error_and_cancels(tmp_path: Path) -> None:
    """What is not a chunk: 400 before the head, an error line after it, the connection closed, the work cancelled."""
    engine = FakeEngine()
    with running_service(tmp_path, engine) as service:
        with service.connect() as connection:
            connection.sendall(head(ROUTE, TEXT, CHUNKED) + b"zz\r\nabc\r\n")
            answer = Answer(connection)
            assert answer.read_head() == 400
            assert answer.headers["x-request-id"] and b'"bad_http"' in answer.read_body()
            assert answer.at_end()
        with service.connect() as connection:
            connection.sendall(head(ROUTE + "?window=4", TEXT, CHUNKED) + chunk(b"abcd"))
            answer = Answer(connection)
            assert answer.read_head() == 200
            body = answer.read_chunk()
            connection.sendall(b"not a chunk\r\n")
            lines = lines_of(body + answer.read_body())
            assert lines[-1]["object"] == "error" and lines[-1]["error"]["code"] == "bad_http"
            assert answer.at_end()
        eventually(lambda: engine.open_count == 0 and len(engine.cancelled) == 1, "the cancel")
        check_rows(encode(service, b"again"), b"again", 512)


def test_a_body_over_the_limit(tmp_path: Path) -> None:
    """A body declared too long gets 413 at once, one found too long on the way an error line."""
    with running_service(tmp_path, body_bytes=100_000) as service:
        declared = httpx.post(service.url + ROUTE, content=b"x" * 200_000)
        assert declared.status_code == 413 and declared.json()["error"]["code"] == "body_too_large"
        with service.connect() as connection:
            connection.sendall(head(ROUTE, TEXT, CHUNKED) + chunk(b"x" * 60_000))
            answer = Answer(connection)
            assert answer.read_head() == 200
            connection.sendall(chunk(b"x" * 60_000) + LAST_CHUNK)
            assert lines_of(answer.read_body())[-1]["error"]["code"] == "body_too_large"


def test_rows_over_the_spool_limit(tmp_path: Path) -> None:
    """When a client never reads, its rows fill the spool and the answer ends with an error that says what to do."""
    with running_service(tmp_path, row_spool_bytes=200_000, client_stall_seconds=5) as service:
        with service.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            data = b"x" * 400_000
            connection.sendall(head(ROUTE + "?granularity=token", TEXT, f"Content-Length: {len(data)}"))
            sender = send_in_background(connection, data)
            eventually(lambda: len(service.engine.cancelled) == 1, "the request to be given up")
            sender.join(60)
            answer = Answer(connection)
            assert answer.read_head() == 200
            last = lines_of(answer.read_body())[-1]
        assert last["error"]["code"] == "disk_full" and "read the answer while you send" in last["error"]["message"]


def test_a_client_that_neither_reads_nor_sends_is_dropped(tmp_path: Path) -> None:
    """Once rows cannot be delivered and nothing arrives for long enough, the request is cancelled."""
    engine = FakeEngine(keep=False)
    with running_service(tmp_path, engine, client_stall_seconds=0.3) as service:
        with service.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            data = b"x" * 300_000
            request = head(ROUTE + "?granularity=token", TEXT, "Content-Length: 999999", "x-request-id: stalled")
            connection.sendall(request + data)
            assert service.logged("stalled")["reason"] == "client_gone"
        eventually(lambda: len(engine.cancelled) == 1, "the cancel")


def test_a_body_that_pauses_too_long_is_given_up(tmp_path: Path) -> None:
    """No bytes for longer than the limit: an error line, or 408 when nothing had come at all."""
    with running_service(tmp_path, body_idle_seconds=0.2) as service:
        for first, status in ((b"", 408), (chunk(b"abc"), 200)):
            with service.connect() as connection:
                connection.sendall(head(ROUTE, TEXT, CHUNKED) + first)
                answer = Answer(connection)
                assert answer.read_head() == status
                assert b'"body_timeout"' in answer.read_body()


def test_an_engine_that_refuses_or_is_not_ready(tmp_path: Path) -> None:
    """Before the head the engine's refusal is an HTTP status with Retry-After."""
    engine = FakeEngine(refuse="overloaded")
    with running_service(tmp_path, engine, engine_ready_seconds=0) as service:
        refused = httpx.post(service.url + ROUTE, content=b"abc")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "overloaded"
        engine.ready, engine.reason = False, "rank 3 is starting"
        waiting = httpx.post(service.url + ROUTE, content=b"abc")
        assert waiting.status_code == 503 and "rank 3 is starting" in waiting.json()["detail"]
        assert waiting.headers["retry-after"]


def test_tokens_do_not_depend_on_the_cut(service: RunningService) -> None:
    """The engine gets the same tokens for one body however it is cut into chunks."""
    data = "naïve café — déjà vu ".encode() * 200
    seen = []
    for size in (1, 5, 1000, len(data)):
        service.engine.received.clear()
        answer = encode(service, iter([data[i : i + size] for i in range(0, len(data), size)]), "granularity=document")
        sent = b"".join(m.tokens for m in service.engine.received if isinstance(m, Tokens))
        seen.append((sent, answer))
    assert all(one == seen[0] for one in seen)


TEXT_PLAIN = {"content-type": "text/plain"}
OTHERS = {
    "PDF": (b"%PDF-1.7 \xe2\xe3" + bytes(3000), "pdftotext book.pdf book.txt"),
    "HTML": (b" <!doctype html><html><p>It was</html>", "pandoc -f html"),
    "UTF-16": ("It was".encode("utf-16"), "iconv -f utf-16"),
    "UTF-8": ("It was in a café, in March.".encode("latin-1"), "iconv -f latin1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_text_is_refused_before_work_begins(
    service: RunningService, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library, at each door the answer says what it is and which command makes text of it; however cut."""
    monkeypatch.setattr(documents, "LIBRARY", "a_library_that_is_not_there")
    data, command = OTHERS[name]
    cut = [data[at : at + 1] for at in range(len(data))]
    file = httpx.post(
        f"{service.url}/v1/files", files={"file": ("a.txt", data, "text/plain")}, data={"purpose": "user_data"}
    )
    named = {"json": {"file_id": file.json()["id"]}}
    begun = sum(isinstance(message, Tokens) for message in service.engine.received)
    doors = [
        (ROUTE, {"content": data, "headers": TEXT_PLAIN}),
        (ROUTE, {"files": {"file": ("book", data, "text/plain")}}),
        ("/v1/jobs", {"content": data, "headers": TEXT_PLAIN}),
        ("/v1/jobs", named),
        ("/v1/estimate?window=10", {"content": data, "headers": TEXT_PLAIN}),
    ]
    if name != "UTF-8":  # which in a file is found while it is read
        doors += [(ROUTE, named), ("/v1/estimate", named), (ROUTE, {"content": data})]
        doors += [(ROUTE, {"content": iter(cut), "headers": TEXT_PLAIN})]
    for path, sent in doors:
        answer = httpx.post(service.url + path, timeout=60, **sent)  # type: ignore[arg-type]
        assert answer.status_code in (400, 415), (path, answer.text)
        said = answer.json()["detail"]
        assert name in said and command in said, (path, said)
        assert ("[documents]" in said) == (name in ("PDF", "HTML") and "estimate?" not in path)
        assert "octet-stream" not in said and "octet-stream" in answer.json()["hint"]
    assert begun == sum(isinstance(message, Tokens) for message in service.engine.received)
    check_rows(encode(service, data, **{"Content-Type": "application/octet-stream"}), data, 512)


LONG = "".join(f"Paragraph {i} tells of grün and of {i * 7919 % 1000} ships.\n" for i in range(9000)).encode()


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", "", "application/json"])
def test_bodies_in_gzip(service: RunningService, kind: str) -> None:
    """Of one or more members, padded or not, wherever they are cut: the rows are those of what they hold."""
    data = LONG[:90_000] if kind == "application/json" else LONG
    body = json.dumps({"input": data.decode()}).encode() if kind == "application/json" else data
    packed = gzip.compress(body[:70_001]) + 1000 * gzip.compress(b"") + gzip.compress(body[70_001:]) + bytes(11)
    headers = {"Content-Encoding": "gzip"} | ({"Content-Type": kind} if kind else {})
    check_rows(encode(service, packed, **headers), data, 512)
    check_rows(encode(service, iter([packed[at : at + 37] for at in range(0, len(packed), 37)]), **headers), data, 512)


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (LONG, "is not gzip"),
        (gzip.compress(LONG) + b"more", "is not gzip"),
        (gzip.compress(LONG)[:-9], "ends before its end"),
        (gzip.compress(LONG)[:-5] + b"\0\0\0\0\0", "is not gzip"),
        (gzip.compress(LONG) + 1002 * gzip.compress(b""), "more than 1000 members"),
        (b"", "empty"),
    ],
)
def test_broken_gzip_is_said_in_words(service: RunningService, packed: bytes, said: str) -> None:
    """A job of it is a 400 that says how it is broken, and nothing of it stays."""
    answer = httpx.post(f"{service.url}/v1/jobs", content=packed, headers=TEXT_PLAIN | {"Content-Encoding": "gzip"})
    assert answer.status_code == 400 and said in answer.json()["detail"], answer.text
    assert httpx.get(f"{service.url}/v1/jobs").json()["data"] == []


def test_gzip_cannot_hold_more_than_a_document_may(tmp_path: Path) -> None:
    """The limit counts what comes out, and what grows beyond all measure is refused before the limit."""
    packed = gzip.compress(bytes(40_000_000), 9)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/octet-stream"}
    with running_service(tmp_path, body_bytes=1_000_000) as service:
        answer = httpx.post(f"{service.url}/v1/jobs", content=packed, headers=headers, timeout=60)
        assert answer.status_code == 413 and "1000000 bytes" in answer.json()["detail"]
        as_json = httpx.post(
            f"{service.url}{ROUTE}", content=packed, headers=headers | {"Content-Type": "application/json"}
        )
        assert as_json.status_code == 413, as_json.text
    with running_service(tmp_path / "wide", FakeEngine(keep=False), body_bytes=1 << 30) as service:
        answer = httpx.post(f"{service.url}/v1/jobs", content=packed, headers=headers, timeout=60)
        assert answer.status_code == 413 and "200 times" in answer.json()["detail"]


def test_the_length_of_a_body_in_gzip_is_not_that_of_its_text(service: RunningService) -> None:
    """npy, which has the number of rows in its header, is refused for it, and given for a form or `identity`."""
    packed = {"content": gzip.compress(b"abc"), "headers": TEXT_PLAIN | {"Content-Encoding": "gzip"}}
    refused = httpx.post(f"{service.url}{ROUTE}?format=npy", **packed)  # type: ignore[arg-type]
    assert refused.status_code == 400 and "not in gzip" in refused.json()["detail"]
    plain = {"content": b"abc", "headers": TEXT_PLAIN | {"Content-Encoding": "identity"}}
    for sent in (plain, {"files": {"file": ("a.txt", b"abc")}}):
        answer = httpx.post(f"{service.url}{ROUTE}?format=npy", **sent)
        assert answer.content.startswith(b"\x93NUMPY"), answer.text


@pytest.mark.parametrize("coding", ["br", "deflate", "zstd", "gzip, gzip"])
def test_other_codings_are_refused(service: RunningService, coding: str) -> None:
    """The answer names the coding and what can be sent."""
    answer = httpx.post(service.url + ROUTE, content=b"abc", headers=TEXT_PLAIN | {"Content-Encoding": coding})
    assert answer.status_code == 415 and coding in answer.text and "or in gzip" in answer.text


@pytest.mark.parametrize("route", [ROUTE, "/v1/jobs"])
def test_a_form_with_a_file_is_its_document(service: RunningService, route: str) -> None:
    """`curl -F file=@book.txt`: rows are those of the file; options stand in the query."""
    answer = httpx.post(f"{service.url}{route}?window=100", files={"file": ("book.txt", LONG)}, timeout=60)
    if route == "/v1/jobs":
        url = f"{service.url}/v1/jobs/{answer.json()['id']}"
        answer = httpx.get(f"{url}/result", timeout=60)
        httpx.delete(url)
    check_rows(lines_of(answer.content), LONG, 100)


def test_a_form_in_gzip(service: RunningService) -> None:
    """The coding is of the whole body."""
    form = httpx.Request("POST", "http://x", files={"file": ("book.txt", LONG)})
    packed = gzip.compress(form.read())
    headers = {"Content-Type": form.headers["content-type"], "Content-Encoding": "gzip"}
    check_rows(encode(service, packed, **headers), LONG, 512)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"files": {"file": ("a", b"abc")}, "data": {"window": "7"}}, "?window=512"),
        ({"files": [("file", ("a", b"abc")), ("more", ("b", b"abc"))]}, "one document at a time"),
        ({"files": {"file": (None, b"abc")}}, "beside its file"),
        ({"content": b"--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "no file"),
        ({"content": b"abc", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
        ({"files": {"file": ("a", b"")}}, "empty"),
    ],
)
def test_other_forms_are_refused_in_words(service: RunningService, form: dict[str, Any], said: str) -> None:
    """Fields beside the file, several files, none, and what is no form."""
    answer = httpx.post(f"{service.url}/v1/jobs", timeout=60, **form)
    assert answer.status_code == 400 and said in answer.json()["detail"], answer.text

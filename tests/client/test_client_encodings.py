"""The client's encodings against a real service: the same rows whatever is sent, and through cut connections."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dist_attn.errors import InputError
from dist_attn_client import (
    AsyncClient,
    Client,
    EncodingProgress,
    Missing,
    OutOfTime,
    Retry,
    Row,
    ServiceFailed,
    Unreachable,
    Unusable,
)
from tests.support.cutting_proxy import Cut, cutting_proxy
from tests.support.fake_engine import FakeEngine, row_vector
from tests.support.opening import is_encoding
from tests.support.programs import free_port
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

BOOK = "".join(f"Line {n} of a book that is long enough. " for n in range(3000)).encode()
QUICK = Retry(first_s=0.01, longest_s=0.02)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service, for tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[Client]:
    """A client of it."""
    with Client(service.url, retry=QUICK) as made:
        yield made


def bits(rows: list[Row]) -> list[tuple[int, int, int, int, int, bytes]]:
    """Rows as values that can be compared."""
    return [(r.index, r.start, r.stop, r.byte_start, r.byte_stop, r.embedding.tobytes()) for r in rows]


def expected(data: bytes, window: int) -> list[tuple[int, int, int, int, int, bytes]]:
    """What the fake engine makes of a text, by its plainest definition."""
    tokens = np.frombuffer(data, np.uint8).astype(np.int32)
    cuts = range(0, len(data), window)
    parts = [(at, min(at + window, len(data))) for at in cuts]
    return [(i, a, b, a, b, row_vector(tokens[a:b], "mean").tobytes()) for i, (a, b) in enumerate(parts)]


def test_rows_are_the_same_whatever_is_sent(client: Client, tmp_path: Path) -> None:
    """A text, bytes, a path, a file, one that stands in its middle, and pieces give the rows of their bytes."""
    path = tmp_path / "book.txt"
    path.write_bytes(BOOK)
    late = io.BytesIO(b"not this" + BOOK)
    late.seek(8)
    pieces = (BOOK[at : at + 777] for at in range(0, len(BOOK), 777))
    wanted = expected(BOOK, 1000)
    for document in (BOOK.decode(), BOOK, path, io.BytesIO(BOOK), late, pieces):
        stream = client.encode(document, window=1000)
        assert bits(list(stream)) == wanted
        assert (stream.end.tokens, stream.end.rows, stream.end.model) == (len(BOOK), len(wanted), "tiny")
    stored = client.files.upload(path)
    assert bits(list(client.encode(file_id=stored.id, window=1000))) == wanted


def test_progress_says_how_far_it_is(client: Client) -> None:
    """Bytes grow to the document's size, then rows and tokens to those of the summary."""
    told: list[EncodingProgress] = []
    rows = list(client.encode(BOOK, window=4096, on_progress=told.append))
    assert told[-1] == EncodingProgress(len(BOOK), len(BOOK), len(rows), len(BOOK))
    assert [x.rows for x in told if x.rows] == list(range(1, len(rows) + 1))
    assert all(a.sent_bytes <= b.sent_bytes for a, b in pairwise(told))


@pytest.mark.parametrize("form", ["path", "stream"])
def test_an_encoding_goes_on_through_cut_connections(service: RunningService, tmp_path: Path, form: str) -> None:
    """Cut while the text is sent and twice among the rows, the rows are those of an undisturbed run, each once."""
    path = tmp_path / "book.txt"
    path.write_bytes(BOOK)
    with cutting_proxy(service.port) as proxy, Client(proxy.url, retry=QUICK) as client:
        proxy.cuts.extend((Cut(sent=40_000), Cut(answered=5000), Cut(answered=9000), Cut(answered=300)))
        document = path if form == "path" else (BOOK[at : at + 5000] for at in range(0, len(BOOK), 5000))
        stream = client.encode(document, window=500)
        rows = bits(list(stream))
        assert rows == expected(BOOK, 500)
        assert stream.end.rows == len(rows)
        assert proxy.made == 4 and proxy.connections == 5


def test_the_asynchronous_client_goes_on_too(service: RunningService) -> None:
    """An asynchronous stream through a cut connection gives the same rows, and two encodings run beside each other."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(BOOK), 3000):
            await asyncio.sleep(0)
            yield BOOK[at : at + 3000]

    async def rows_of(client: AsyncClient, window: int) -> list[Row]:
        return [row async for row in client.encode(pieces(), window=window)]

    async def run(url: str) -> list[list[Row]]:
        async with AsyncClient(url, retry=QUICK) as client:
            return await asyncio.gather(rows_of(client, 600), rows_of(client, 900))

    with cutting_proxy(service.port) as proxy:
        proxy.cuts.extend((Cut(answered=4000), Cut(answered=4000)))
        first, second = asyncio.run(run(proxy.url))
        assert proxy.made == 2
    assert bits(first) == expected(BOOK, 600)
    assert bits(second) == expected(BOOK, 900)


def test_the_synchronous_client_works_inside_a_running_loop(client: Client) -> None:
    """As in a notebook: an event loop that runs does not disturb it, nor is it needed."""

    async def cell() -> list[Row]:
        return list(client.encode(BOOK, window=3000))

    assert bits(asyncio.run(cell())) == expected(BOOK, 3000)


def test_a_loop_that_is_left_closes_its_connection(tmp_path: Path) -> None:
    """Whether by break, by `with` or by forgetting the iterator, the service notices at once and stops the work."""
    engine = FakeEngine(draw_seconds=0.05)
    with running_service(tmp_path, engine) as service, Client(service.url) as client:

        def gone() -> int:
            return sum(line.get("reason") == "client_gone" for line in service.log_lines())

        for count, way in enumerate(("break", "with", "forget"), 1):
            if way == "with":
                with client.stream("abc", max_tokens=1000) as pieces:
                    next(pieces)
            elif way == "break":
                for _ in client.stream("abc", max_tokens=1000):
                    break
            else:
                next(client.stream("abc", max_tokens=1000))
            eventually(lambda count=count: gone() == count, f"the end of the work after {way}")  # type: ignore[misc]
        assert engine.open_count == 0


def test_what_cannot_be_done_is_said(service: RunningService, client: Client, tmp_path: Path) -> None:
    """Errors say what was given, needed, and to do; each is of its own kind, and input errors are InputError too."""
    (tmp_path / "a.txt").write_bytes(b"abc")
    with pytest.raises(Unusable, match="empty") as empty:
        list(client.encode(b""))
    assert isinstance(empty.value, InputError) and (empty.value.status, empty.value.code) == (400, "empty_input")
    with pytest.raises(Missing, match="another") as missing:
        list(client.encode(b"abc", model="another"))
    assert missing.value.code == "model_not_found" and missing.value.request_id
    with pytest.raises(InputError, match=r"give Path\("):
        client.encode(str(tmp_path / "a.txt"))
    with pytest.raises(InputError, match="No such file"):
        client.encode(tmp_path / "no.txt")
    with pytest.raises(InputError, match="either a document or"):
        client.encode()
    with pytest.raises(TypeError, match="no parameter 'windw'; it has granularity, window"):
        client.encode(b"abc", windw=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no parameter 'tokns'"):
        client.estimate(tokns=5)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="mode 'rb'"):
        list(client.encode(io.StringIO("text")))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="authorization") as hidden, Client(service.url, key="schlüssel") as keyed:
        keyed.models()
    assert "schl" not in str(hidden.value)
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:8000"):
        Client("localhost:8000")
    with (
        Client(f"http://127.0.0.1:{free_port()}", retry=Retry(tries=2, first_s=0.01)) as nobody,
        pytest.raises(Unreachable, match="is it running"),
    ):
        nobody.models()

    async def async_pieces() -> AsyncIterator[bytes]:
        await asyncio.sleep(0)
        yield b"abc"

    with pytest.raises(RuntimeError, match="AsyncClient"):
        list(client.encode(async_pieces()))


def test_an_engine_that_fails_is_tried_again_and_then_told(tmp_path: Path) -> None:
    """A failure in mid-stream is asked again from the next row, as often as the policy says, and then is raised."""
    engine = FakeEngine(fail_at=20_000)
    with (
        running_service(tmp_path, engine) as service,
        Client(service.url, retry=Retry(tries=3, first_s=0.01)) as client,
    ):
        rows, stream = [], client.encode(BOOK, window=1000)
        with pytest.raises(ServiceFailed, match="rank 1 died") as failed:
            for row in stream:
                rows.append(row)
        assert failed.value.code == "engine_failed"
        assert bits(rows) == expected(BOOK, 1000)[: len(rows)]
        opened = [message for message in engine.received if is_encoding(message)]
        assert len(opened) >= 3


def test_a_deadline_ends_it(tmp_path: Path) -> None:
    """Work that does not come to its end in time is OutOfTime, whether the service is silent or keeps failing."""
    engine = FakeEngine(paused=True)
    with running_service(tmp_path, engine) as service:
        with Client(service.url) as client, pytest.raises(OutOfTime, match=r"0\.3 s"):
            list(client.encode(BOOK, deadline_s=0.3))
        engine.ready = False
        with Client(f"http://127.0.0.1:{free_port()}") as nobody, pytest.raises(OutOfTime):
            nobody.status(deadline_s=0.1)
    with pytest.raises(InputError, match="above 0"):
        Client(service.url).encode(BOOK, deadline_s=0)

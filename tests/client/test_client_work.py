"""Sessions, files, jobs, texts and figures through the client, against a real service, with connections that break."""

import asyncio
import hashlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from dist_attn.errors import InputError
from dist_attn.settings import JobSettings
from dist_attn_client import (
    AsyncClient,
    BrokenOff,
    Choice,
    Client,
    Conflict,
    KeyRefused,
    Missing,
    Retry,
    Unusable,
)
from tests.support.cutting_proxy import Cut, CuttingProxy, cutting_proxy
from tests.support.fake_engine import FakeEngine, row_vector
from tests.support.fake_sessions import after, drawn_from, stored
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

BOOK = "".join(f"Line {n} of a book that is long enough. " for n in range(130)).encode()
QUICK = Retry(first_s=0.01, longest_s=0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service, for tests that leave its engine's knobs as they found them."""
    engine = FakeEngine(draw_seconds=0.001)
    jobs = JobSettings(look_s=0.02, save_s=0.05)
    with running_service(tmp_path_factory.mktemp("service"), engine, checkpoint_tokens=512, jobs=jobs) as running:
        yield running


@pytest.fixture
def proxy(service: RunningService) -> Iterator[CuttingProxy]:
    """A proxy before it that cuts what it is told to cut."""
    with cutting_proxy(service.port) as made:
        yield made


@pytest.fixture
def client(proxy: CuttingProxy) -> Iterator[Client]:
    """A client that goes through the proxy."""
    with Client(proxy.url, retry=QUICK) as made:
        yield made


def test_the_client_never_loads_torch() -> None:
    """A fresh interpreter with the client has neither torch nor the service in it."""
    code = "import sys, dist_attn_client as c; c.Client(); print({'torch', 'service', 'fastapi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_session_from_its_making_to_its_end(client: Client) -> None:
    """Made, fed, forked, listed, asked, moved as a file, ended: each call does what the route does."""
    session = client.sessions.create(name="book", metadata={"by": "me"})
    fed = client.sessions.append(session.id, BOOK).rest()
    assert (fed.start, fed.position, fed.replayed) == (0, len(BOOK), False)
    assert [point.position for point in client.sessions.checkpoints(session.id)][-1] == len(BOOK)
    fork = client.sessions.fork(session.id, position=512, name="half")
    assert (fork.position, fork.parent, fork.parent_position) == (512, session.id, 512)
    assert {session.id, fork.id} <= {one.id for one in client.sessions.all()}
    drawn = client.sessions.generate(session.id, max_tokens=5, temperature=0)
    assert drawn.text.encode() == bytes(drawn_from(after(0, BOOK), 5)).decode(errors="replace").encode()
    assert (drawn.session.start, drawn.session.position) == (len(BOOK), len(BOOK) + 5)
    state = client.sessions.state(session.id, position=1024)
    assert (state.position, state.data) == (1024, stored(after(0, BOOK[:1024]), 1024))
    other = client.sessions.create()
    assert client.sessions.put_state(other.id, state.data).position == 1024
    with pytest.raises(Conflict) as refused:
        client.sessions.put_state(other.id, state.data)
    assert refused.value.status == 428
    with pytest.raises(Conflict) as elsewhere:
        client.sessions.append(other.id, b"x", expected_position=3).rest()
    assert elsewhere.value.position == 1024
    client.sessions.delete(other.id)
    with pytest.raises(Missing):
        client.sessions.get(other.id)


def test_an_append_is_done_once_through_cut_connections(client: Client, proxy: CuttingProxy) -> None:
    """Cut while it is sent and before its last line, the text is in the session once; so it is after a later call."""
    session = client.sessions.create()
    proxy.cuts.extend((Cut(sent=3000), Cut(answered=150)))
    client.close()
    with Client(proxy.url, retry=QUICK) as fresh:
        fed = fresh.sessions.append(session.id, BOOK, key="chapter-1").rest()
        assert proxy.made == 2
        again = fresh.sessions.append(session.id, BOOK, key="chapter-1").rest()
        assert (fed.position, again.position, again.replayed) == (len(BOOK), len(BOOK), True)
        assert fresh.sessions.state(session.id).data == stored(after(0, BOOK), len(BOOK))


def test_an_upload_feeds_a_session_through_a_cut_connection(client: Client, proxy: CuttingProxy) -> None:
    """The session comes to stand where an append of the whole text brings it; one that stands elsewhere is refused."""
    session = client.sessions.create()
    client.close()
    proxy.cuts.extend((Cut(), Cut(sent=3000)))
    lone = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
    with lone, Client(proxy.url, retry=Retry(first_s=0.6, longest_s=0.6), http=lone) as fresh:
        fed = fresh.sessions.upload(session.id, BOOK, expected_position=0)
        assert (proxy.made, fed.state, fed.start, fed.position) == (1, "done", 0, len(BOOK))
        assert fresh.sessions.state(session.id).data == stored(after(0, BOOK), len(BOOK))
        with pytest.raises(Conflict) as refused:
            fresh.sessions.upload(session.id, BOOK, expected_position=3)
        assert refused.value.position == len(BOOK)


def test_what_is_drawn_in_a_session_is_drawn_once(client: Client, proxy: CuttingProxy) -> None:
    """A generation whose stream breaks is told to its end, each piece once, and stands in the session once."""
    session = client.sessions.create()
    client.sessions.append(session.id, b"abc").rest()
    client.close()
    proxy.cuts.append(Cut(answered=2000))
    with Client(proxy.url, retry=QUICK) as fresh:
        stream = fresh.sessions.stream(session.id, max_tokens=60, temperature=0)
        text = "".join(piece.text for piece in stream)
        whole = bytes(drawn_from(after(0, b"abc"), 60)).decode(errors="replace")
        assert (proxy.made, text) == (1, whole)
        assert stream.end.session is not None and stream.end.session.position == 63
        assert fresh.sessions.get(session.id).position == 63


def test_a_text_goes_on_through_a_cut_connection(proxy: CuttingProxy) -> None:
    """A streamed completion that breaks is drawn again by its seed, and every piece of each choice comes once."""
    prompt = "It was the best of times, it was the worst of times"
    proxy.cuts.extend((Cut(answered=3000), Cut(answered=6000)))
    with Client(proxy.url, retry=QUICK) as client:
        stream = client.stream(prompt, max_tokens=40, n=2)
        pieces: list[Choice] = list(stream)
        assert proxy.made == 2
        for index in (0, 1):
            assert "".join(piece.text for piece in pieces if piece.index == index) == prompt[:40]
            assert [piece.finish_reason for piece in pieces if piece.index == index][-1] == "length"
        assert stream.end.usage.completion_tokens == 80
        whole = client.complete(prompt, max_tokens=40)
        assert (whole.text, whole.usage.completion_tokens) == (prompt[:40], 40)
        with pytest.raises(Unusable, match="temperature"):
            client.complete(prompt, temperature=-9)


def test_another_text_after_a_break_is_not_passed_off_as_the_same(tmp_path: Path) -> None:
    """Where drawing again gives another text, the stream ends with an error that says so."""
    texts = iter((b"one text that is long enough for this", b"another text"))
    engine = FakeEngine(reply=lambda prompt, sampling: list(next(texts)))
    with running_service(tmp_path, engine) as service, cutting_proxy(service.port) as proxy:
        proxy.cuts.append(Cut(answered=2000))
        with Client(proxy.url, retry=QUICK) as client, pytest.raises(Exception, match="came out otherwise"):
            list(client.stream("abc", max_tokens=100))
        assert proxy.made == 1


def test_an_upload_goes_on_at_the_byte_that_is_safe(
    client: Client, proxy: CuttingProxy, service: RunningService
) -> None:
    """Cut twice, a file arrives whole; what had arrived is not sent again, and it comes back whole."""
    data = hashlib.shake_256(b"seed").digest(3_000_000)
    client.close()
    proxy.cuts.extend((Cut(), Cut(sent=800_000), Cut(), Cut(sent=900_000)))
    starts: list[int] = []

    def note(request: httpx.Request) -> None:
        if request.method == "PATCH":
            starts.append(int(request.headers["upload-offset"]))
        if request.method == "HEAD":  # which is answered with what the service has written by then
            there = f"{service.url}{request.url.path}"
            safe = starts[-1] + 200_000
            eventually(
                lambda: int(httpx.head(there, headers=request.headers).headers["upload-offset"]) > safe,
                "the first part",
            )

    lone = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), event_hooks={"request": [note]})
    with lone, Client(proxy.url, retry=QUICK, http=lone) as fresh:
        file = fresh.files.upload(io.BytesIO(data), filename="data.bin")
        assert proxy.made == 2
        assert len(starts) == 3 and starts[0] == 0
        assert (file.bytes, file.filename) == (len(data), "data.bin")
        proxy.cuts.append(Cut(answered=1_000_000))
        stream = fresh.files.content(file.id)
        assert b"".join(stream) == data and stream.end == len(data)
        assert proxy.made == 3
        assert file in fresh.files.all()
        fresh.files.delete(file.id)
        with pytest.raises(Missing):
            fresh.files.get(file.id)


def test_a_job_is_followed_and_fetched_through_cut_connections(client: Client, proxy: CuttingProxy) -> None:
    """Its events come once each and in order, and its rows are those of an encoding."""
    direct = [row.embedding.tobytes() for row in client.encode(BOOK, window=64)]
    job = client.jobs.encode(BOOK, window=64)
    assert client.jobs.wait(job.id).status == "succeeded"
    client.close()
    with Client(proxy.url, retry=QUICK) as fresh:
        proxy.cuts.append(Cut(answered=330))
        numbers = [event.number for event in fresh.jobs.events(job.id)]
        assert numbers == sorted(set(numbers)) and proxy.made == 1
    with Client(proxy.url, retry=QUICK) as fresh:
        proxy.cuts.extend((Cut(answered=3000), Cut(answered=4000)))
        rows = fresh.jobs.rows(job.id)
        assert [row.embedding.tobytes() for row in rows] == direct
        assert rows.end.rows == len(direct) and proxy.made == 3
        assert job.id in {one.id for one in fresh.jobs.all()}
        text = fresh.jobs.complete("abc", max_tokens=4)
        assert fresh.jobs.wait(text.id).ended and fresh.jobs.completion(text.id).text == "abca"
        fresh.jobs.delete(job.id)
        with pytest.raises(Missing):
            fresh.jobs.cancel(job.id)


def test_what_may_have_been_done_is_not_done_twice(client: Client, proxy: CuttingProxy) -> None:
    """A session or job whose making broke off is an error, not a second one."""
    before = len(client.sessions.all()), len(client.jobs.all())
    client.close()
    for make in (lambda c: c.sessions.create(), lambda c: c.jobs.encode(BOOK)):
        with Client(proxy.url, retry=QUICK) as fresh:
            proxy.cuts.append(Cut(answered=1))
            with pytest.raises(BrokenOff, match="not known"):
                make(fresh)
    with Client(proxy.url) as fresh:
        assert (len(fresh.sessions.all()), len(fresh.jobs.all())) == (before[0] + 1, before[1] + 1)


def test_a_file_of_the_service_in_place_of_a_document(client: Client) -> None:
    """Jobs and estimates take it by its id; a file without a byte is one too."""
    file = client.files.upload(BOOK, filename="book.txt")
    job = client.jobs.wait(client.jobs.encode(file_id=file.id, window=1000).id)
    assert (job.status, job.input_bytes) == ("succeeded", len(BOOK))
    assert client.estimate(file_id=file.id).tokens.value > 0
    assert client.files.upload(b"").bytes == 0
    with pytest.raises(InputError, match="either a document or"):
        client.jobs.encode(BOOK, file_id=file.id)


def test_vectors_and_tokens_of_texts(client: Client) -> None:
    """Embeddings come as one array in the order of the texts, and tokens go there and back."""
    vectors = client.embed(["abc", "b"])
    np.testing.assert_array_equal(
        vectors, [row_vector(np.array(text, np.int32), "mean") for text in ([97, 98, 99], [98])]
    )
    assert vectors.dtype == np.float32
    assert client.detokenise(client.tokenise("añ€")) == "añ€"


def test_passages_and_documents_for_a_query(client: Client) -> None:
    """A job's rows and a text are searched together; rows end at sentences and at boundaries; texts come in order."""
    text = "A fox ran. A cat sat. Nobody came."
    job = client.jobs.wait(client.jobs.encode(text, granularity="sentence").id)
    found = client.search("fox", [{"id": "job", "job_id": job.id}, "No fox."], mode="lexical", granularity="sentence")
    assert {(one.document, one.index, one.text) for one in found.results} == {
        ("job", 0, "A fox ran."),
        ("1", 0, "No fox."),
    }
    assert found.results[0].parts.dense is None and [one.complete for one in found.documents] == [True, True]
    rows = list(client.encode(text, granularity="sentence"))
    assert [(row.byte_start, row.byte_stop) for row in rows] == [(0, 10), (10, 21), (21, 34)]
    assert [row.byte_stop for row in client.encode(text, boundaries=[10, 21])] == [10, 21, 34]
    bounded = client.jobs.wait(client.jobs.encode(text, boundaries=[10, 21]).id)
    assert [row.byte_stop for row in client.jobs.rows(bounded.id)] == [10, 21, 34]
    for encode in (client.encode, client.jobs.encode):
        with pytest.raises(InputError, match="boundaries go with"):
            encode(text.encode(), boundaries=[10])
    ordered = client.rerank("abc", ["zebra", "abc"], return_documents=True).results
    assert ordered[0].document is not None and {one.index for one in ordered} == {0, 1}


def test_figures_and_models(client: Client) -> None:
    """Estimates, models, status and readiness come as typed values."""
    estimate = client.estimate(tokens=1_000_000, window=512)
    assert (estimate.tokens.value, estimate.tokens.source, estimate.rows) == (1_000_000, "given", 1954)
    (model,) = client.models()
    assert client.model(model.id) == model and "completions" in " ".join(model.capabilities)
    status = client.status()
    assert status.ready and status.ranks[0].phase == "idle" and client.ready()


def test_keys_are_sent_and_asked_for(tmp_path: Path) -> None:
    """With its key a client is let in; without, the error says how to give one."""
    keys = (hashlib.sha256(b"secret").hexdigest(),)
    with running_service(tmp_path, api_keys=keys) as service:
        with Client(service.url + "/v1/", key="secret") as client:
            assert client.models()[0].id == "tiny"
        with Client(service.url) as client, pytest.raises(KeyRefused, match=r"Client\(url, key="):
            client.models()


def test_the_asynchronous_client_has_all_of_it(service: RunningService) -> None:
    """Sessions, texts, files and jobs work the same from a coroutine."""

    async def work() -> tuple[str, int, bytes, str]:
        async with AsyncClient(service.url, retry=QUICK) as client:
            session = await client.sessions.create()
            fed = await client.sessions.append(session.id, BOOK).rest()
            pieces = [piece.text async for piece in client.stream("abcdef", max_tokens=6)]
            file = await client.files.upload(BOOK)
            content = b"".join([piece async for piece in client.files.content(file.id)])
            job = await client.jobs.wait((await client.jobs.encode(BOOK)).id)
            return "".join(pieces), fed.position, content, job.status

    assert asyncio.run(work()) == ("abcdef", len(BOOK), BOOK, "succeeded")

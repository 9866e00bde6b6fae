"""Documents that are not plain text at every door of the API: encoded as their text, once taken out, or refused."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.base.tasks import stop_tasks
from dist_attn_service.text import extraction
from dist_attn_service.text.extraction import Extraction
from dist_attn_service.text.spool import DiskBudget

from dist_attn.wire.messages import Tokens
from dist_attn_client import Client
from tests.service.test_encodings import ROUTE, check_rows, encode
from tests.support.files import wrong_in
from tests.support.raw_http import lines_of
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually
from tests.text.test_documents import BAD, GOOD, NAMES_HTML, QUICK, book

TYPES = {
    "pdf": "application/pdf",
    "html": "text/html",
    "epub": "application/epub+zip",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "notes.md": "text/markdown",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service that leaves nothing of a document under way."""
    pytest.importorskip("kreuzberg", reason="pip install -e '.[documents]'")
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running
        assert httpx.get(f"{running.url}/metrics").status_code == 200
    assert wrong_in(running.settings.files_folder) == []


def stored(service: RunningService, data: bytes, name: str) -> str:
    """The id of a file."""
    form = {"files": {"file": (name, data, "application/octet-stream")}, "data": {"purpose": "user_data"}}
    answer = httpx.post(f"{service.url}/v1/files", **form)  # type: ignore[arg-type]
    return str(answer.json()["id"])


@pytest.mark.parametrize("name", GOOD)
def test_a_document_is_encoded_as_its_text(service: RunningService, name: str) -> None:
    """As a body that comes in bytes, in a form and as a file the rows are those of the text, which can be had."""
    make, text, sections = GOOD[name]
    data, wanted = make(), text.encode()
    told = [] if name == "notes.md" else sections

    def check(lines: list[dict[str, Any]]) -> None:
        """The rows are those of the text, and name the sections of its kind."""
        if told:
            names = [next((one for begin, one in reversed(told) if begin <= at), None) for at in range(len(wanted))]
            assert [line.pop("section") for line in lines[:-1]] == names[::7]
        check_rows(lines, wanted, 7)

    cut = iter([data[at : at + 5] for at in range(0, len(data), 5)])
    check(encode(service, cut, "window=7", **{"Content-Type": TYPES[name]}))
    form = httpx.post(f"{service.url}{ROUTE}?window=7", files={"file": (name, data)}, timeout=60)
    check(lines_of(form.content))
    file = stored(service, data, name)
    for _ in range(2):
        answer = httpx.post(service.url + ROUTE, json={"file_id": file, "window": 7}, timeout=60)
        check(lines_of(answer.content))
    assert httpx.get(f"{service.url}/v1/files/{file}/content").content == data
    if name == "notes.md":  # is its own text
        return
    text_file = f"{service.url}/v1/files/{file}-text"
    assert httpx.get(f"{text_file}/content").content == wanted
    details = httpx.get(text_file).json()
    assert (details["filename"], details["bytes"]) == (f"{name}.txt", len(wanted))
    assert httpx.delete(f"{service.url}/v1/files/{file}").status_code == 200
    assert httpx.get(text_file).status_code == 404


def test_the_text_of_a_file_is_taken_out_once(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at the same moment and later ones read one text, and a job and an estimate do so too."""
    file = stored(service, GOOD["pdf"][0](), "book.pdf")
    named = {"json": {"file_id": file}, "timeout": 60}

    def encoded(_: int) -> bytes:
        return httpx.post(service.url + ROUTE, **named).content  # type: ignore[arg-type]

    with ThreadPoolExecutor(3) as threads:
        answers = set(threads.map(encoded, range(3)))
    monkeypatch.delattr(extraction, "read_answer")
    assert answers == {encoded(0)}
    size = len(GOOD["pdf"][1])
    assert httpx.post(f"{service.url}/v1/estimate", **named).json()["tokens"]["value"] == size  # type: ignore[arg-type]
    job = httpx.post(f"{service.url}/v1/jobs", **named).json()  # type: ignore[arg-type]
    address = f"{service.url}/v1/jobs/{job['id']}"
    eventually(lambda: httpx.get(address).json()["status"] == "succeeded", "the job to end")
    assert job["input_bytes"] == size
    names = ["page 1", "page 2"]
    pyarrow_ipc = pytest.importorskip("pyarrow.ipc", reason="pip install -e '.[arrow]'")
    with Client(service.url) as client:
        assert [row.section for row in client.encode(file_id=file, window=15)] == names
        made = client.jobs.encode(file_id=file, window=15)
        client.jobs.wait(made.id)
        assert [row.section for row in client.jobs.rows(made.id)] == names
        for document in ({"job_id": made.id}, {"file_id": file}):
            found = client.search("words", [document], window=15)
            assert sorted((one.byte_start, one.section) for one in found.results) == [(0, "page 1"), (15, "page 2")]
    table = httpx.get(f"{service.url}/v1/jobs/{made.id}/result?format=arrow").content
    assert pyarrow_ipc.open_stream(table).read_all().column("section").to_pylist() == names
    listed = [one["id"] for one in httpx.get(f"{service.url}/v1/files").json()["data"]]
    assert listed.count(f"{file}-text") == 1


@pytest.mark.parametrize("what", QUICK)  # the others are refused by the same process
def test_what_is_malformed_or_huge_is_refused(service: RunningService, what: str) -> None:
    """The answer is a 4xx in words, nothing of it goes to the engine or stays, and the service goes on."""
    data = BAD[what]()
    begun = sum(isinstance(message, Tokens) for message in service.engine.received)
    file = stored(service, data, "file")
    for sent in ({"json": {"file_id": file}}, {"files": {"file": ("file", data)}}):
        answer = httpx.post(service.url + ROUTE, timeout=300, **sent)  # type: ignore[arg-type]
        assert answer.status_code in (413, 415) and "octet-stream" in answer.json()["hint"], answer.text
        assert "cannot be read" in answer.json()["detail"], answer.text
    assert begun == sum(isinstance(message, Tokens) for message in service.engine.received)
    assert httpx.get(f"{service.url}/v1/files/{file}-text").status_code == 404
    assert httpx.delete(f"{service.url}/v1/files/{file}").status_code == 200


def test_a_document_that_is_too_long_takes_no_disk(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a 413, and no disk stays taken."""
    monkeypatch.setattr(extraction, "MOST_FILE", 100)
    kind = {"content-type": TYPES["epub"]}
    data = book(OPS__oneDOTxhtml="<p>A", OPS__twoDOTxhtml="<p>B")
    assert httpx.post(service.url + ROUTE, content=data, headers=kind).status_code == 413
    used = "dist_attn_spool_bytes 0"
    eventually(lambda: used in httpx.get(f"{service.url}/metrics").text, used)


def test_a_text_is_no_document(service: RunningService) -> None:
    """One about HTML, which begins as a page does, is read as it is when its file is named."""
    file = stored(service, b"<html><body>&lt;html&gt; &lt;p&gt;begins a page</body></html>", "page.html")
    answers = [
        httpx.post(service.url + ROUTE, json={"file_id": name, "window": 7}, timeout=60)
        for name in (file, f"{file}-text")
    ]
    text = httpx.get(f"{service.url}/v1/files/{file}-text/content").content
    assert text.startswith(b"<html>")
    for answer in answers:
        check_rows(lines_of(answer.content), text, 7)
    assert httpx.get(f"{service.url}/v1/files/{file}-text-text").status_code == 404


@pytest.mark.parametrize("kind", ["text/plain", "", "text/html"])
def test_what_only_names_html_is_a_page_by_its_type_alone(service: RunningService, kind: str) -> None:
    """As a body, in a form and as a file: else it is a 415, and its text is not another one in silence."""
    status = 200 if kind == "text/html" else 415
    form = {"files": {"file": ("doc.xml", NAMES_HTML, kind or "application/octet-stream")}}
    sent = {"content": NAMES_HTML, "headers": {"content-type": kind} if kind else {}}
    file = httpx.post(f"{service.url}/v1/files", data={"purpose": "user_data"}, **form).json()["id"]  # type: ignore[arg-type]
    for body in (sent, form, {"json": {"file_id": file}}):
        assert httpx.post(service.url + ROUTE, timeout=60, **body).status_code == status  # type: ignore[arg-type]


# ---- without a service ---------------------------------------------------------------------------


def text_of(extractor: Extraction, data: bytes) -> AsyncGenerator[bytes]:
    """The text of a document that comes in one piece."""

    async def pieces() -> AsyncGenerator[bytes]:
        yield data

    return extractor.text_of(pieces(), [])


async def text_by(extractor: Extraction, data: bytes) -> bytes:
    """All of the text of a document."""
    return b"".join([piece async for piece in text_of(extractor, data)])


async def holding(what: Callable[[], bool]) -> None:
    """Wait in the event loop until this holds."""
    while not what():  # noqa: ASYNC110 - neither a semaphore nor a process has an event for this
        await asyncio.sleep(0.01)


@pytest.fixture
def extractor(tmp_path: Path) -> Iterator[Extraction]:
    """An extraction that has given back all of its budget in the end."""
    pytest.importorskip("kreuzberg", reason="pip install -e '.[documents]'")
    made = Extraction(tmp_path, DiskBudget(1 << 30))
    yield made
    assert made.budget.used == 0


def test_documents_that_wait_hold_no_thread(extractor: Extraction, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all places are taken the threads of the event loop serve others; then each that waits is a 429."""

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        for _ in range(extraction.PROCESSES):
            await extractor.places.acquire()
        waiting = [asyncio.create_task(text_by(extractor, GOOD["pdf"][0]())) for _ in range(3)]
        await holding(lambda: len(extractor.places._waiters or ()) == len(waiting))
        await asyncio.to_thread(int)
        assert not any(task.done() for task in waiting)
        await stop_tasks(*waiting)
        monkeypatch.setattr(extraction, "WAIT_SECONDS", 0.01)
        with pytest.raises(ServiceError) as refused:
            await text_by(extractor, GOOD["pdf"][0]())
        assert (refused.value.status, "retry-after" in refused.value.headers) == (429, True)
        for _ in range(extraction.PROCESSES):
            extractor.places.release()
        assert await text_by(extractor, GOOD["pdf"][0]()) == GOOD["pdf"][1].encode()

    asyncio.run(run())


def test_a_process_ends_with_its_task(extractor: Extraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is cancelled, also twice, ends at once and not after the document; so does one out of time."""
    told = tmp_path / "told"
    words = f"import os, time; open({str(told)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(1000)"
    monkeypatch.setattr(extraction, "bounded_command", lambda *_: ([sys.executable, "-c", words], {}))

    async def run() -> None:
        task = asyncio.create_task(text_by(extractor, GOOD["pdf"][0]()))
        await holding(lambda: task.done() or (told.exists() and told.read_text().endswith(".")))
        task.cancel()
        await asyncio.sleep(0)
        await stop_tasks(task)
        process = Path(f"/proc/{told.read_text()[:-1]}")
        await holding(lambda: not process.exists())
        monkeypatch.setattr(extraction, "WALL_SECONDS", 0.01)
        with pytest.raises(ServiceError, match="could not be read in"):
            await text_by(extractor, GOOD["pdf"][0]())

    asyncio.run(run())


def test_a_text_stays_within_the_budget_until_it_is_read(extractor: Extraction) -> None:
    """It lies in the folder of the spools, reserved at first for the longest; without such room it is a 507."""

    async def run() -> None:
        whole = text_of(extractor, GOOD["pdf"][0]())
        assert await anext(whole) == GOOD["pdf"][1].encode()
        assert len(GOOD["pdf"][1]) < extractor.budget.used < extraction.MOST_ANSWER
        await whole.aclose()
        assert extractor.budget.used == 0
        extractor.budget.limit = extraction.MOST_ANSWER
        with pytest.raises(ServiceError) as refused:
            await text_by(extractor, GOOD["pdf"][0]())
        assert refused.value.status == 507

    asyncio.run(run())

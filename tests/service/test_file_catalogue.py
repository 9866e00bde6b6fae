"""The books of files behind the routes: what expires goes, what died is swept, and charges agree with the bytes."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service.base.errors import ClientGone, ServiceError
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.jobs.catalogue import JobCatalogue, JobLimits
from dist_attn_service.uploads.earlier import forget_parts
from dist_attn_service.uploads.ledger import Details, FileLedger, Usage, remote_moment
from dist_attn_service.uploads.multipart import Form
from dist_attn_service.uploads.service import FileService

from dist_attn.errors import StorageError
from dist_attn.store.ledger import moment
from dist_attn.text.documents import Section
from tests.support.files import audit, opened_files
from tests.support.service_server import running_service
from tests.support.stores import Clock, redis_server, why_no_redis

DETAILS = Details("a.txt", "text/plain", "user_data")
FORM = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n--b--\r\n'


def body(data: bytes, *, breaks: bool = False) -> RequestBody:
    """A request's body that arrives in pieces, and perhaps breaks off."""
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]

    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces) or breaks}
        return {"type": "http.disconnect"} if breaks else {"type": "http.request", "body": b"", "more_body": False}

    return RequestBody(receive, idle_seconds=5)  # type: ignore[arg-type]


async def add(service: FileService, data: bytes, caller: str = "ann", **options: Any) -> str:
    """The id of a file."""
    given = body(FORM % (b"file", data), **options)
    name, _ = await service.add_file(caller, b"b", given, None, ("purpose",), lambda form: _told(form))
    return name


def _told(form: Form) -> Details:
    return DETAILS


def run(folder: Path, work: Callable[[FileService, Clock], Awaitable[Any]], **options: Any) -> Any:
    """What `work` returns of the files of a folder, whose books must be in order afterwards."""

    async def whole() -> Any:
        clock = Clock()
        async with opened_files(folder, clock=clock, **options) as service:
            result = await work(service, clock)
            assert await audit(service) == []
            assert (await service.upkeep.sweep()).blobs == 0
            return result

    return asyncio.run(whole())


def left_in(folder: Path) -> int:
    """How many blobs there are."""
    return len(list((folder / "bytes").glob("??/*")))


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_what_expires_goes(tmp_path: Path, kind: str) -> None:
    """Uploads end a while after they went on last, files at their time; bytes, room and records go with them."""
    if kind == "redis" and why_no_redis():
        pytest.skip(why_no_redis())

    async def work(service: FileService, clock: Clock) -> None:
        stream, _ = await service.catalogue.begin("ann", 100, DETAILS)
        other, _ = await service.catalogue.begin("ann", 100, DETAILS)
        file = await add(service, b"x" * 50)
        clock.now += 50
        await service.append("ann", stream, 0, body(b"y" * 10), None)
        await service.append("ann", other, 0, body(b"z" * 10), None)
        assert service.catalogue.total == Usage(250, 3) and left_in(tmp_path) == 3
        clock.now += 60  # past the first end of the uploads
        assert await service.offset(await service.catalogue.upload("ann", stream)) == 10
        clock.now += 50
        for name in (stream, other):
            with pytest.raises(ServiceError, match="has expired"):
                await service.catalogue.upload("ann", name)
        swept = await service.upkeep.sweep()
        assert (swept.uploads, swept.files) == (2, 0) and left_in(tmp_path) == 1
        clock.now += 1000
        assert (await service.upkeep.sweep()).files == 1
        with pytest.raises(ServiceError, match="has expired"):
            await service.catalogue.file("ann", file)
        assert service.catalogue.total == Usage() and left_in(tmp_path) == 0

    where = {"catalogue": redis_server()} if kind == "redis" else {}
    run(tmp_path, work, upload_s=100, file_s=1000, **where)


def test_files_without_their_catalogue_are_not_swept_away(tmp_path: Path) -> None:
    """A new catalogue over bytes is refused with what to do, and one that is emptied meanwhile ends nothing."""

    async def emptied(service: FileService, _: Clock) -> None:
        async def forget(ledger: FileLedger) -> None:
            for key, _value in await ledger.transaction.scan("", 1000):
                ledger.transaction.delete(key)

        await service.catalogue.change(forget)
        assert (await service.upkeep.sweep()).blobs == 0

    async def first(service: FileService, _: Clock) -> str:
        return await add(service, b"x" * 50)

    async def again(service: FileService, _: Clock) -> None:
        record = await service.catalogue.file("ann", name)
        assert b"".join([piece async for piece in service.read(record.segments, 0, record.size)]) == b"x" * 50

    name = run(tmp_path, first)
    kept = (tmp_path / "files.sqlite").read_bytes()
    run(tmp_path, emptied)
    with pytest.raises(StorageError, match="holds 1 files or uploads, and their catalogue is not there"):
        run(tmp_path, first)
    for left in tmp_path.glob("files.sqlite*"):
        left.unlink()
    (tmp_path / "files.sqlite").write_bytes(kept)
    run(tmp_path, again)


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_jobs_without_their_catalogue_stop_the_start(tmp_path: Path, how: str) -> None:
    """A new catalogue of jobs over the files of jobs is refused with what to do; with the old one they are there."""
    with running_service(tmp_path) as service:
        name = httpx.post(f"{service.url}/v1/jobs", content=b"text").json()["id"]
    catalogue = tmp_path / "data/jobs/catalogue.sqlite"
    content = catalogue.read_bytes()
    for left in catalogue.parent.glob("catalogue.sqlite*"):
        left.unlink()
    if how == "empty":
        catalogue.write_bytes(b"")
    with pytest.raises(StorageError, match=r"holds the files of 1 jobs, and their catalogue .* put a backup"):
        asyncio.run(opened_jobs(tmp_path / "data"))
    catalogue.write_bytes(content)
    with running_service(tmp_path) as service:
        assert httpx.get(f"{service.url}/v1/jobs/{name}").status_code == 200


async def opened_jobs(data: Path) -> None:
    """Open the catalogue of jobs and close it."""
    await (await JobCatalogue.open("", data / "jobs", JobLimits(1 << 30, 100, 15.0))).close()


def test_a_clock_that_is_set_wrong_deletes_nothing(tmp_path: Path) -> None:
    """Set ahead by more than a life it hides files and uploads; they are there again once it is right, or else go."""

    async def work(service: FileService, clock: Clock) -> None:
        stream, _ = await service.catalogue.begin("ann", 100, DETAILS)
        await service.append("ann", stream, 0, body(b"y" * 10), None)
        files = [await add(service, b"x" * 50) for _ in range(70)]  # more than one page of those that end
        clock.now += 200
        for step in (8 * 86_400.0, 0.0):
            clock.step = step
            for _ in range(3):
                swept = await service.upkeep.sweep()
                assert (swept.uploads, swept.files) == (0, 0) and left_in(tmp_path) == 71
                clock.now += 40
            if step:
                with pytest.raises(ServiceError, match="has expired"):
                    await service.catalogue.file("ann", files[0])
        assert await service.offset(await service.catalogue.upload("ann", stream)) == 10
        found, _more = await service.catalogue.files("ann", after=None, limit=100, order="asc", purpose=None)
        assert {name for name, _ in found} == set(files)
        clock.step = 8 * 86_400.0
        await service.upkeep.sweep()
        clock.now += 200
        swept = await service.upkeep.sweep()
        assert (swept.uploads, swept.files) == (1, 70) and left_in(tmp_path) == 0

    run(tmp_path, work, grace_s=200.0, upload_s=86_400, file_s=86_400)


def test_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    """Bytes without a record go at once, room that nobody writes into after a while, and what is written stays."""

    async def work(service: FileService, clock: Clock) -> None:
        await service.catalogue.begin("ann", 100, DETAILS)
        dead = [await service._reservations.for_file("ann", 500) for _ in range(2)]
        live = await service._reservations.for_file("bob", 10)
        for blob in dead:
            async with service._folder.writing(blob) as writer:
                await writer.write(b"half")
                await writer.flush()
        stray = tmp_path / "bytes/ff" / ("0" * 41 + "ff")
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"?")
        async with service._folder.writing(live):
            assert service.catalogue.total == Usage(1110, 1)
            assert (await service.upkeep.sweep()).blobs == 1 and not stray.exists()
            clock.now += 400
            assert (await service.upkeep.sweep()).blobs == 2
            assert service.catalogue.total == Usage(110, 1)
            assert [path.name for path in (tmp_path / "bytes").glob("??/*")] == [live]
        await service._reservations.give_up(live)
        with pytest.raises(ServiceError, match="meanwhile"):
            await service._reservations.into_file(dead[1], 4, DETAILS)

    run(tmp_path, work)


def test_a_power_cut_costs_what_was_not_synced(tmp_path: Path) -> None:
    """On another start of the machine only what was synced counts; on the same one every byte of the file does."""
    upload = ""

    async def first(service: FileService, _: Clock) -> None:
        nonlocal upload
        upload, _record = await service.catalogue.begin("ann", 10_000, DETAILS)
        await service.append("ann", upload, 0, body(b"a" * 3000), None)
        with pytest.raises(ClientGone):
            await service.append("ann", upload, 3000, body(b"b" * 2500, breaks=True), None)
        assert await service.offset(await service.catalogue.upload("ann", upload)) == 5500

    async def again(service: FileService, _: Clock) -> int:
        return await service.offset(await service.catalogue.upload("ann", upload))

    async def after(service: FileService, _: Clock) -> bytes:
        assert await service.offset(await service.catalogue.upload("ann", upload)) == 3000
        with pytest.raises(ServiceError, match="stands at 3000"):
            await service.append("ann", upload, 5500, body(b"x"), None)
        record, _ = await service.append("ann", upload, 3000, body(b"c" * 7000), 7000)
        file = await service.catalogue.file("ann", record.file)
        return b"".join([piece async for piece in service.read(file.segments, 0, file.size)])

    run(tmp_path, first, boot="monday")
    assert run(tmp_path, again, boot="monday") == 5500
    assert run(tmp_path, after, boot="tuesday") == b"a" * 3000 + b"c" * 7000


def test_a_file_is_made_after_a_death_before_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a process ends between the last byte and the file, who asks where the upload stands gets the file."""
    upload = ""

    async def dies(*_: object) -> None:
        raise ClientGone

    async def first(service: FileService, _: Clock) -> None:
        nonlocal upload
        upload, _record = await service.catalogue.begin("ann", 3000, DETAILS)
        with monkeypatch.context() as patched, pytest.raises(ClientGone):
            patched.setattr(service.catalogue, "complete", dies)
            await service.append("ann", upload, 0, body(b"a" * 3000), None)
        assert (await service.catalogue.upload("ann", upload)).state == "pending"

    async def then(service: FileService, _: Clock) -> bytes:
        record = await service.standing("ann", upload)
        assert record.state == "completed" and await service.standing("ann", upload) == record
        file = await service.catalogue.file("ann", record.file)
        return b"".join([piece async for piece in service.read(file.segments, 0, file.size)])

    run(tmp_path, first)
    assert run(tmp_path, then) == b"a" * 3000


def test_a_share_is_used_to_its_last_byte(tmp_path: Path) -> None:
    """What open uploads announced counts, and all callers have a limit."""

    async def work(service: FileService, _: Clock) -> None:
        upload, _record = await service.catalogue.begin("ann", 600, DETAILS)
        await add(service, b"x" * 400)
        with pytest.raises(ServiceError, match="they may have 1000") as refused:
            await add(service, b"y")
        assert refused.value.status == 429
        await service.append("ann", upload, 0, body(b"z" * 500), None)
        await add(service, b"v" * 400, "bob")
        with pytest.raises(ServiceError, match="all files of this service") as refused:
            await add(service, b"w" * 101, "bob")
        assert refused.value.status == 507
        await add(service, b"w" * 100, "bob")
        with pytest.raises(ServiceError, match="you may have 3"):
            for _ in range(4):
                await service.catalogue.begin("carl", 0, DETAILS)
        await service.catalogue.delete_upload("ann", upload)
        await add(service, b"y" * 600)

    run(tmp_path, work, caller_bytes=1000, all_bytes=1500, caller_files=3)


def test_a_form_that_breaks_gives_its_room_back(tmp_path: Path) -> None:
    """A body that breaks off, a form that is none, and details that are refused leave neither bytes nor charges."""

    async def work(service: FileService, _: Clock) -> None:
        with pytest.raises(ClientGone):
            await add(service, b"x" * 5000, breaks=True)
        with pytest.raises(ServiceError, match="ends before"):
            await service.add_file("ann", b"b", body((FORM % (b"file", b"x"))[:-9]), 60, (), _told)

        def refuse(_form: Form) -> Details:
            raise ServiceError("no", status=400)

        with pytest.raises(ServiceError, match="no"):
            await service.add_file("ann", b"b", body(FORM % (b"file", b"x")), 60, (), refuse)
        assert service.catalogue.total == Usage() and left_in(tmp_path) == 0

    run(tmp_path, work)


def test_a_text_ends_with_its_document(tmp_path: Path) -> None:
    """It expires when its document does, and of one that is deleted meanwhile no text and no charge stays."""

    async def work(service: FileService, clock: Clock) -> None:
        async def deleted(pieces: AsyncGenerator[bytes], _: list[Section]) -> AsyncGenerator[bytes]:
            async for piece in pieces:
                yield piece
            await service.catalogue.delete_file("ann", name)

        async def taken(pieces: AsyncGenerator[bytes], sections: list[Section]) -> AsyncGenerator[bytes]:
            sections.append((0, "page 1"))
            async for piece in pieces:
                yield piece

        name = await add(service, b"x" * 50)
        record = await service.catalogue.file("ann", name)
        clock.now += 50
        text = await service.text_file("ann", name, record, taken)
        assert (text.size, text.expires_at) == (50, record.expires_at)
        assert await service.sections(text) == [(0, "page 1")] and await audit(service) == []
        clock.now += 60
        assert (await service.upkeep.sweep()).files == 2
        name = await add(service, b"y" * 50)
        with pytest.raises(ServiceError, match="was deleted"):
            await service.text_file("ann", name, await service.catalogue.file("ann", name), deleted)
        assert service.catalogue.total == Usage() and left_in(tmp_path) == 0

    run(tmp_path, work, file_s=100)


def test_many_writers_at_once(tmp_path: Path) -> None:
    """Files and uploads of several callers at once leave books that agree with the bytes."""

    async def one(service: FileService, caller: str) -> None:
        name, _ = await service.catalogue.begin(caller, 5000, DETAILS)
        await service.append(caller, name, 0, body(b"x" * 2500), 2500)
        await service.append(caller, name, 2500, body(b"x" * 2500), 2500)
        await service.catalogue.delete_file(caller, await add(service, b"y" * 100, caller))

    async def work(service: FileService, _: Clock) -> Usage:
        await asyncio.gather(*(one(service, f"caller {n}") for n in range(6)))
        return service.catalogue.total

    assert run(tmp_path, work) == Usage(30_000, 12)


def test_no_key_stands_in_the_catalogue(tmp_path: Path) -> None:
    """Neither callers nor what a key hashes to can be read from the catalogue, and the bytes are the owner's alone."""

    async def work(service: FileService, _: Clock) -> None:
        await add(service, b"x", "caller-digest")

    run(tmp_path, work)
    rows = sqlite3.connect(tmp_path / "files.sqlite").execute("SELECT key, value FROM records").fetchall()
    assert rows and not any("caller-digest" in f"{key}{value!r}" for key, value in rows)
    (blob,) = (tmp_path / "bytes").glob("??/*")
    assert blob.stat().st_mode & 0o077 == 0


def test_a_folder_of_an_earlier_version_opens(tmp_path: Path) -> None:
    """A file of several parts is read, an upload goes on; uploads in parts go with their bytes and charges."""
    details = {"filename": "a", "mime_type": "text/plain", "purpose": "batch", "lives_s": 0.0}
    ids = {
        name: f"{number:042x}" for number, name in enumerate(("first", "last", "stream", "part", "writing", "form"), 1)
    }

    async def write(service: FileService, clock: Clock) -> None:
        tenant, now = service.catalogue.tenant("ann"), clock()
        common = {"tenant": tenant, "details": details, "made_at": now}
        upload = {**common, "length": 6, "expires_at": now + 100, "kind": "", "parts": 0, "received": 0, "writing": 0,
                  "blob": "", "synced": 0, "boot": "", "file": "", "made_of": [], "metadata": "", "feed": None,
                  "state": "pending"}  # fmt: skip
        segments = [{"blob": ids["first"], "size": 3}, {"blob": ids["last"], "size": 3}]
        records: dict[str, Any] = {
            "file/file-1": {**common, "size": 6, "expires_at": 0.0, "segments": segments},
            "upload/upload_1": {**upload, "kind": "stream", "blob": ids["stream"], "synced": 3},
            "upload/upload_2": {**upload, "kind": "parts", "parts": 1, "received": 6, "writing": 6},
            "upload/upload_3": {**upload, "state": "cancelled"},
            "part/upload_2/part_1": {"segment": {"blob": ids["part"], "size": 6}, "made_at": now},
        }
        owners = dict.fromkeys(("first", "last"), "file/file-1") | {"stream": "upload/upload_1"}
        owners |= dict.fromkeys(("part", "writing"), "upload/upload_2") | {"form": ""}
        for name, owner in owners.items():
            held = 6 if name in ("writing", "form") else 0
            records[f"blob/{ids[name]}"] = {"tenant": tenant, "owner": owner, "made_at": now, "held": held}
            path = tmp_path / "bytes" / ids[name][-2:] / ids[name]
            path.parent.mkdir(parents=True)
            path.write_bytes(name[:3].encode())
        usage = {"bytes": 6 + 6 + 12 + 6, "entries": 4}
        records |= {f"usage/{tenant}": usage, "total": usage}
        keys = [f"expiry/{moment(now + 100)}/upload/upload_{n}" for n in (1, 2, 3)] + [
            f"held/{ids[name]}" for name in ("writing", "form")
        ]
        keys += [f"oldest/{tenant}/{moment(now)}/file-1", f"newest/{tenant}/{remote_moment(now)}/file-1"]

        async def put(ledger: FileLedger) -> None:
            for key, value in records.items():
                ledger.transaction.put(key, json.dumps(value).encode())
            for key in keys:
                ledger.transaction.put(key, b"")

        await service.catalogue.change(put)

    async def read(service: FileService, name: str) -> bytes:
        file = await service.catalogue.file("ann", name)
        return b"".join([piece async for piece in service.read(file.segments, 0, file.size)])

    async def look(service: FileService, clock: Clock) -> None:
        await forget_parts(service.catalogue, service._folder)
        await service.upkeep.sweep()  # as in each round: a replica of before may still have written a form
        assert await read(service, "file-1") == b"firlas"
        for name in ("upload_2", "upload_3"):
            with pytest.raises(ServiceError, match="there is no"):
                await service.catalogue.upload("ann", name)
        assert service.catalogue.total == Usage(12, 2) and left_in(tmp_path) == 3
        clock.now += 50
        record, _ = await service.append("ann", "upload_1", 3, body(b"eam"), None)
        assert await read(service, record.file) == b"str" + b"eam"
        clock.now += 400
        await service.upkeep.sweep()
        assert left_in(tmp_path) == 3

    asyncio.run(_with_files(tmp_path, write))
    run(tmp_path, look)


async def _with_files(folder: Path, work: Callable[[FileService, Clock], Awaitable[None]]) -> None:
    clock = Clock()
    async with opened_files(folder, clock=clock) as service:
        await work(service, clock)

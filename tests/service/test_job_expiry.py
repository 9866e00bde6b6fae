"""Jobs that expire by a clock which may be wrong: they are hidden at once, and deleted after a grace."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from dist_attn_service.base.errors import NotFound
from dist_attn_service.base.logs import make_log
from dist_attn_service.base.settings import Settings
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.jobs.catalogue import JobCatalogue, JobLimits, JobRecord, end_of
from dist_attn_service.jobs.files import JobStates, JobStore
from dist_attn_service.jobs.runner import JobRunner, Report

from dist_attn.settings.tree import JobSettings
from dist_attn.store import StateStore
from dist_attn.store.files import BlobFolder
from dist_attn.store.memory import MemoryBlobs, MemoryRecords
from tests.support.service_server import model_folder
from tests.support.stores import Clock

GRACE_S, DAY_S = 100.0, 86_400.0


def run(
    folder: Path, work: Callable[[JobCatalogue, JobRunner, Clock, list[str]], Awaitable[None]], keep_s: float = DAY_S
) -> None:
    """Have `work` done with the catalogue, the upkeep and the names of three jobs: ended, waiting, being received."""

    async def whole() -> None:
        clock, log = Clock(), make_log()
        settings = Settings(
            api_address="ipc:///nowhere",
            model=model_folder(folder),
            data_dir=folder,
            expired_seconds=GRACE_S,
            jobs=JobSettings(keep_s=keep_s),
        )
        catalogue = JobCatalogue(MemoryRecords(), JobLimits(1 << 30, 300, 15.0), clock)
        store = await StateStore.over(MemoryRecords(), MemoryBlobs())
        files = BlobFolder(folder)
        kept = JobStore(catalogue, files, JobStates(store, log))
        runner = JobRunner(settings, kept, {}.__getitem__, log, Metrics(), clock.monotonic)
        now = clock()
        waits = JobRecord(
            caller="ann", kind="encoding", model="m", created_at=now, expires_at=now + DAY_S, state="queued"
        )
        receives = JobRecord(
            caller="ann", kind="encoding", model="m", created_at=now, expires_at=now + DAY_S, state="receiving",
            runner=catalogue.runner, lease_until=now + 15.0,
        )  # fmt: skip
        names = [await catalogue.add(record) for record in (end_of(waits, "succeeded", now, DAY_S), waits, receives)]
        for name in names:
            files.append(f"{name}/input", b"kept")
        await work(catalogue, runner, clock, names)
        await store.close()

    asyncio.run(whole())


def left_in(folder: Path) -> int:
    """How many jobs have files."""
    return len([*folder.glob("??/*/input")])


def test_a_clock_that_is_set_wrong_deletes_no_job(tmp_path: Path) -> None:
    """Set ahead by more than a life it hides jobs, runs none and deletes none; once it is right they are there."""

    async def work(catalogue: JobCatalogue, runner: JobRunner, clock: Clock, names: list[str]) -> None:
        clock.now += 2 * GRACE_S
        until = clock() + 15.0
        await catalogue.change(names[2], lambda record: msgspec.structs.replace(record, lease_until=until))
        for step in (8 * DAY_S, 0.0, 8 * DAY_S, 0.0):
            clock.step = step
            await runner._sweep()
            assert left_in(tmp_path) == 3
            clock.now += 3
            await runner._sweep()
            assert left_in(tmp_path) == 3
            listed = {name for name, _ in await catalogue.listed("ann", "", 10)}
            assert listed == (set() if step else set(names[:2]))
            if step:
                assert await catalogue.claim(lambda record: record) is None
                with pytest.raises(NotFound, match="expired"):
                    await catalogue.get(names[0], "ann")

    run(tmp_path, work)


def test_what_has_expired_goes_after_its_grace(tmp_path: Path) -> None:
    """A job goes once it has been expired for so long, one whose receiver is silent after its lease."""

    async def work(catalogue: JobCatalogue, runner: JobRunner, clock: Clock, names: list[str]) -> None:
        clock.now += DAY_S + GRACE_S - 1
        await runner._sweep()
        assert left_in(tmp_path) == 2
        clock.now += 1
        await runner._sweep()
        assert left_in(tmp_path) == 0

    run(tmp_path, work)


@pytest.mark.parametrize(("keep_s", "between_s"), [(DAY_S, 30.0), (60.0, 20.0)])
def test_expired_jobs_are_looked_for_now_and_then(
    keep_s: float, between_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and again once 30 s have passed, or a third of the life of an ended job; not in every round."""
    rounds, sweeps = [0], [0]

    async def count(counter: list[int]) -> None:
        counter[0] += 1

    async def work(catalogue: JobCatalogue, runner: JobRunner, clock: Clock, _: list[str]) -> None:
        monkeypatch.setattr(catalogue, "claim", lambda *_: count(rounds))
        monkeypatch.setattr(runner, "_sweep", lambda: count(sweeps))

        async def whole_round() -> None:
            goal = rounds[0] + 2  # the one that may be under way, and one that begins after it
            while rounds[0] < goal:
                runner.wake()
                await asyncio.sleep(0)

        runner.start()
        for passed, wanted in ((0.0, 1), (between_s, 1), (0.1, 2), (between_s, 2), (0.1, 3), (0.0, 3)):
            clock.now += passed
            await whole_round()
            assert sweeps == [wanted]
        await runner.stop()

    run(tmp_path, work, keep_s)


def test_two_saves_at_one_moment_have_no_speed() -> None:
    """Clocks may stand still between two saves: what was read meanwhile says nothing of the speed yet."""
    report, read = Report(), iter((0, 100, 300))
    report.tokens = lambda: next(read)
    assert [report.speed(now) for now in (5.0, 5.0, 7.0)] == [None, None, 150.0]

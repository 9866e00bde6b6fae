"""All that has to do with jobs in one API process, put together, begun and ended with it."""

from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

from service.engine_port import EnginePort
from service.engine_watch import EngineWatch
from service.jobs.book import JobBook, JobLimits
from service.jobs.desk import JobDesk
from service.jobs.files import JobFiles
from service.jobs.results import JobResults
from service.jobs.runner import Complete, JobRunner, Work
from service.jobs.works import CompletionWork, EncodingWork
from service.logs import Log
from service.metrics import Metrics
from service.served_model import ServedModel
from service.settings import Settings
from service.tokenising import TokeniserPort
from service.workload import Workload

__all__ = ["JobOffice", "job_book"]


@asynccontextmanager
async def job_book(settings: Settings) -> AsyncIterator[JobBook]:
    """The catalogue, as long as the block runs.

    Raises: StorageError, ConfigError, MissingExtraError.
    """
    jobs = settings.jobs
    limits = JobLimits(jobs.disk_bytes, jobs.per_caller, jobs.lease_s)
    book = await JobBook.open(jobs.address, settings.data_dir / "jobs", limits)
    try:
        yield book
    finally:
        await book.close()


@final
@dataclass(frozen=True)
class JobOffice:
    """What routes need of jobs (`desk`, `results`), and what works on them (`runner`)."""

    desk: JobDesk
    results: JobResults
    runner: JobRunner

    @staticmethod
    def over(
        book: JobBook,
        settings: Settings,
        engine: EnginePort,
        watch: EngineWatch,
        tokeniser: TokeniserPort,
        model: ServedModel,
        workload: Workload,
        metrics: Metrics,
        threads: Executor,
        complete: Complete,
        log: Log,
    ) -> "JobOffice":
        """The parts over one catalogue; nothing runs before `runner.start()`."""
        files = JobFiles(settings.data_dir / "jobs" / "files")
        works: dict[str, Work] = {
            "encoding": EncodingWork(settings, engine, watch, tokeniser, model, files, workload, metrics),
            "completion": CompletionWork(files, model, complete),
        }
        runner = JobRunner(settings, book, files, works, log, metrics)
        desk = JobDesk(settings, book, files, runner, model, workload)
        return JobOffice(desk, JobResults(settings, book, files, model, threads), runner)

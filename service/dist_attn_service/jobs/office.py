"""All that has to do with jobs in one API process, put together, begun and ended with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

from dist_attn_service.base.settings import Settings
from dist_attn_service.engine.context import ServiceContext
from dist_attn_service.jobs.book import JobBook, JobLimits
from dist_attn_service.jobs.completion_work import CompletionWork
from dist_attn_service.jobs.desk import JobDesk
from dist_attn_service.jobs.encoding_work import EncodingWork
from dist_attn_service.jobs.files import JobFiles
from dist_attn_service.jobs.results import JobResults
from dist_attn_service.jobs.runner import Complete, JobRunner, Work
from dist_attn_service.jobs.states import JobStates

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
    def over(book: JobBook, context: ServiceContext, complete: Complete) -> "JobOffice":
        """The parts over one catalogue; nothing runs before `runner.start()`."""
        settings, model = context.settings, context.model
        files = JobFiles(settings.data_dir / "jobs" / "files")
        states = JobStates(context.store, context.log)
        works: dict[str, Work] = {
            "encoding": EncodingWork(context, files, states),
            "completion": CompletionWork(files, model, complete),
        }
        runner = JobRunner(settings, book, files, states, works, context.log, context.metrics)
        desk = JobDesk(settings, book, files, states, runner, model, context.workload)
        return JobOffice(desk, JobResults(settings, book, files, model, context.threads), runner)

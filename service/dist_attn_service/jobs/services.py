"""All that has to do with jobs in one API process, put together, begun and ended with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

from dist_attn_service.base.settings import Settings
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.jobs.api import JobApi
from dist_attn_service.jobs.catalogue import JobCatalogue, JobLimits
from dist_attn_service.jobs.files import JobFiles
from dist_attn_service.jobs.results import JobResults
from dist_attn_service.jobs.runner import Complete, JobRunner, Work
from dist_attn_service.jobs.states import JobStates
from dist_attn_service.jobs.work import CompletionWork, EncodingWork


@asynccontextmanager
async def job_catalogue(settings: Settings) -> AsyncIterator[JobCatalogue]:
    """The catalogue, as long as the block runs.

    Raises: StorageError, ConfigError, MissingExtraError.
    """
    jobs = settings.jobs
    limits = JobLimits(jobs.disk_bytes, jobs.per_caller, jobs.lease_s)
    catalogue = await JobCatalogue.open(jobs.address, settings.data_dir / "jobs", limits)
    try:
        yield catalogue
    finally:
        await catalogue.close()


@final
@dataclass(frozen=True)
class JobServices:
    """What routes need of jobs (`api`, `results`), and what works on them (`runner`)."""

    api: JobApi
    results: JobResults
    runner: JobRunner

    @staticmethod
    def over(catalogue: JobCatalogue, context: ServiceContext, complete: Complete) -> "JobServices":
        """The parts over one catalogue; nothing runs before `runner.start()`."""
        settings, model = context.settings, context.model
        files = JobFiles(settings.data_dir / "jobs" / "files")
        states = JobStates(context.store, context.log)
        works: dict[str, Work] = {
            "encoding": EncodingWork(context, files, states),
            "completion": CompletionWork(files, model, complete),
        }
        runner = JobRunner(settings, catalogue, files, states, works, context.log, context.metrics)
        api = JobApi(settings, catalogue, files, states, runner, model, context.workload)
        return JobServices(api, JobResults(settings, catalogue, files, model, context.threads), runner)

"""Jobs as they stand in the catalogue of a service."""

from pathlib import Path

from dist_attn_service.jobs.book import JobBook, JobLimits
from dist_attn_service.jobs.record import JobPoint

__all__ = ["point_of"]


async def point_of(data: Path, name: str) -> JobPoint | None:
    """Where a job would go on if its process died now."""
    book = await JobBook.open("", data / "jobs", JobLimits(1 << 30, 100, 15.0))
    try:
        return (await book.get(name)).point
    finally:
        await book.close()

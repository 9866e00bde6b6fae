"""Jobs as they stand in the catalogue of a service."""

from pathlib import Path

from dist_attn_service.jobs.catalogue import JobCatalogue, JobLimits, JobPoint

__all__ = ["point_of"]


async def point_of(data: Path, name: str) -> JobPoint | None:
    """Where a job would go on if its process died now."""
    catalogue = await JobCatalogue.open("", data / "jobs", JobLimits(1 << 30, 100, 15.0))
    try:
        return (await catalogue.get(name)).point
    finally:
        await catalogue.close()

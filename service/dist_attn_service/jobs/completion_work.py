"""The completion of a job, drawn into a file."""

import asyncio
from typing import Any, final

from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.jobs.files import JobFiles
from dist_attn_service.jobs.record import JobRecord
from dist_attn_service.jobs.runner import Complete, Report

__all__ = ["CompletionWork"]


@final
class CompletionWork:
    """Draws a completion, from its beginning each time; its seed is settled, so it is the same each time."""

    def __init__(self, files: JobFiles, model: ServedModel, complete: Complete) -> None:
        self._files = files
        self._model = model
        self._complete = complete

    async def __call__(self, name: str, record: JobRecord, report: Report) -> dict[str, Any]:
        """Draw it and keep it.

        Raises: ServiceError.
        """
        record.check_model(self._model.identity)
        assert record.completion is not None
        drawn = 0

        def draw(count: int) -> None:
            nonlocal drawn
            drawn = count

        report.tokens = lambda: drawn
        result = await self._complete(record.completion, name, draw)
        await asyncio.to_thread(self._files.write_result, name, result)
        return {"tokens": drawn, "disk_bytes": record.disk_bytes + len(result)}

"""Whether a request becomes a job: where its client prefers that, or work waits for too long (RFC 7240)."""

import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from dist_attn_service.base.errors import Code, ServiceError, retry_after
from dist_attn_service.dependencies import Services
from dist_attn_service.encodings.documents import Source
from dist_attn_service.encodings.estimates import Size

__all__ = ["Preference", "becomes_job", "preference_of"]

_WAIT = re.compile(r"wait=\"?(\d{1,9})\"?")


@dataclass(frozen=True)
class Preference:
    """What `Prefer` says: an answer of 202 is welcome, perhaps only where the work takes longer than `wait` seconds."""

    respond_async: bool = False
    wait: int | None = None


def preference_of(headers: Headers) -> Preference:
    """The preferences of a request; those that nobody knows mean nothing."""
    words = [word.split(";")[0].strip().lower() for line in headers.getlist("prefer") for word in line.split(",")]
    waits = [int(found[1]) for word in words if (found := _WAIT.fullmatch(word))]
    return Preference("respond-async" in words, waits[0] if waits else None)


async def becomes_job(services: Services, headers: Headers, source: Source) -> bool:
    """Whether an encoding is answered with 202 and a job.

    Raises: ServiceError (429) when it would wait for longer than `jobs.queue_s`, and neither its client nor the
        settings allow a job.
    """
    preference, limits = preference_of(headers), services.settings.jobs
    if preference.respond_async and preference.wait is None:
        return True
    if source.size is None:
        return preference.respond_async  # nobody knows how long it takes
    queue, total = await services.estimates.delay(Size(size=source.size))
    if preference.respond_async and preference.wait is not None and total > preference.wait:
        return True
    if queue <= limits.queue_s:
        return False
    if preference.respond_async or limits.when_busy == "job":
        return True
    raise ServiceError(
        f"this would wait for about {queue:.0f} s behind other work; send it with `Prefer: respond-async` and it "
        "becomes a job, or send it later",
        code=Code.OVERLOADED,
        headers=retry_after(queue),
    )

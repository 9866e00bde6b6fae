"""The states that jobs go on from: kept in the store of states for as long as the job may need them."""

from collections.abc import AsyncIterator
from typing import final

from dist_attn.errors import DistAttnError, QuotaError, StorageError, UnknownStateError
from dist_attn.store import StateStore
from dist_attn_service.base.errors import NotFound
from dist_attn_service.base.logs import Log
from dist_attn_service.jobs.record import JobPoint


@final
class JobStates:
    """A job can do without a state, from its beginning: what the store has no room for is not kept."""

    def __init__(self, store: StateStore, log: Log) -> None:
        self._store = store
        self._log = log

    async def keep(self, caller: str, pieces: AsyncIterator[bytes], seconds: float) -> str | None:
        """Keep a state for so long; its id, None where there is no room. Memory: a piece.

        Raises: what `pieces` raises.
        """
        snapshots = self._store.snapshots
        try:
            name = (await snapshots.put(caller, pieces)).id
            await snapshots.pin(caller, name, seconds)
        except (QuotaError, StorageError, UnknownStateError) as error:
            self._log.warning("a state of a job was not kept", error=str(error))
            return None
        return name

    async def size(self, caller: str, point: JobPoint) -> int | None:
        """The bytes of a state that was kept; None where it is gone.

        Raises: ServiceError while the store cannot be read.
        """
        try:
            return (await self._store.snapshots.stat(caller, point.snapshot)).size
        except StorageError as error:
            self._log.warning("a state of a job cannot be read", error=str(error))
        except UnknownStateError:
            pass
        return None

    async def pieces(self, caller: str, point: JobPoint) -> AsyncIterator[bytes]:
        """The bytes of a state.

        Raises: NotFound when it cannot be read to its end.
        """
        try:
            async for piece in self._store.snapshots.get(caller, point.snapshot):
                yield piece
        except (UnknownStateError, StorageError) as error:
            raise NotFound(f"the state of this job cannot be read: {error}") from None

    async def forget(self, caller: str, point: JobPoint | None) -> None:
        """It is not needed any more; what others keep for themselves stays."""
        if point is None:
            return
        try:
            await self._store.snapshots.unpin(caller, point.snapshot)
        except DistAttnError as error:  # then its time ends
            self._log.debug("a state of a job was not let go of", error=str(error))

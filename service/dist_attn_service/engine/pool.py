"""Several engines of one model as one: each request goes to one of them, and to another where that one is lost."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import final

import msgspec

from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import Keep, OpenWork, Status
from dist_attn_service.base.errors import EngineUnavailable
from dist_attn_service.base.logs import Log
from dist_attn_service.engine.port import DeleteBlob, EngineHealth, EngineKind, ZmqEnginePort
from dist_attn_service.engine.stream import EngineStream

__all__ = ["EnginePool"]

SUMS = ("queued", "active", "tokens_per_second", "lost_groups", "replayed_tokens")
DIFFERS = "it runs another model than most engines, or computes in another way: new work goes to those"


@final
class EnginePool:
    """The engines behind these ports. Work goes to the least loaded one that is ready.

    While engines run different models, in a rolling change, new work goes to the kind that most of them are of; a
    session goes to one of the kind that made its state.
    """

    def __init__(self, ports: Sequence[ZmqEnginePort], log: Log) -> None:
        self._ports = ports
        self._log = log
        self.refusal: Callable[[Status], str] = lambda status: ""
        """Says why an engine cannot be one of these; empty where it can."""
        self._differing: set[str] = set()
        for port in ports:
            port.changed = self._changed

    async def start(self) -> None:
        """Begin to talk to all engines."""
        await asyncio.gather(*(port.start() for port in self._ports))

    async def close(self) -> None:
        """Fail all open streams, and disconnect."""
        await asyncio.gather(*(port.close() for port in self._ports))

    def discard_with(self, delete_blob: DeleteBlob) -> None:
        """Have stored states that nobody takes deleted by this."""
        for port in self._ports:
            port.discard_with(delete_blob)

    def engines(self) -> Mapping[str, EngineHealth]:
        """The health of each engine by its address; one that is refused is not ready."""
        every, differing = {port.address: self._health(port) for port in self._ports}, self._unlike()
        return every | {address: dataclasses.replace(every[address], reason=DIFFERS) for address in differing}

    def health(self) -> EngineHealth:
        """The health of the engine that is next to get work, with the sums of all; its reasons where none is ready."""
        ready = self._alike()
        heard = [status for port in self._ports if (status := port.health().status) is not None]
        one = self._health(ready[0]) if ready else self._not_ready()
        if one.status is None:
            return one
        sums = {name: sum(getattr(status, name) for status in heard) for name in SUMS}
        return EngineHealth(one.ready, one.reason, msgspec.structs.replace(one.status, **sums), one.age)

    def kind(self, like: Manifest | None = None) -> EngineKind | None:
        """The kind of the engine that is next to get work, that nearest to `like`; None where none is known."""
        return next((port.kind() for port in self._able(like)), None)

    def open(self, work: OpenWork, like: Manifest | None = None, only: EngineKind | None = None) -> EngineStream:
        """Start work on an engine that is like this, or else on one of the kind that most are of, or of this `only`.

        Raises: EngineUnavailable without a connection to any that may have it.
        """
        able = [port for port in self._able(like, only) if only is None or port.kind() == only]
        if not able:
            other = " (of the model that the request began with)" if only else ""
            raise EngineUnavailable(f"no engine can take it{other}: {self._not_ready().reason}")
        port = able[0]
        status = port.health().status
        if like is not None and not work.keep.end and (status is None or status.manifest != like):
            work = msgspec.structs.replace(work, keep=Keep())  # its states would be found by the keys of another model
        stream = port.open(work)
        stream.bound = only is not None
        return stream

    def _refusal(self, port: ZmqEnginePort) -> str:
        status = port.health().status
        return self.refusal(status) if status is not None and status.hidden_size else ""  # 0: it loads its model

    def _health(self, port: ZmqEnginePort) -> EngineHealth:
        health = port.health()
        words = self._refusal(port) if health.ready else ""
        return EngineHealth(False, words, health.status, health.age) if words else health

    def _not_ready(self) -> EngineHealth:
        """The health where no engine is ready: all reasons, and the status of one that may become so."""

        def rank(port: ZmqEnginePort) -> int:
            return 1 if port.health().status is None else 2 * bool(self._refusal(port))

        best = self._health(min(self._ports, key=rank))
        reasons = "; ".join(f"{port.address}: {self._health(port).reason}" for port in self._ports)
        return EngineHealth(False, reasons, best.status, best.age)

    def _ready(self) -> list[ZmqEnginePort]:
        """The engines that take work, the least loaded first."""
        return sorted((port for port in self._ports if self._health(port).ready), key=lambda port: port.load)

    def _able(self, like: Manifest | None = None, only: EngineKind | None = None) -> list[ZmqEnginePort]:
        """The engines that may have work, the best first; where none is ready, those where it can wait."""
        ready = self._alike(like) if only is None else [port for port in self._ready() if port.kind() == only]
        waiting = (port for port in self._ports if not self._refusal(port))
        return ready or sorted(waiting, key=lambda port: port.health().status is None)

    def _alike(self, like: Manifest | None = None) -> list[ZmqEnginePort]:
        """The ready engines of one kind, the least loaded first: that nearest to `like`, or that of most engines."""
        ready = self._ready()
        if like is not None:
            nearest = min((_distance(port, like) for port in ready), default=0)
            return [port for port in ready if _distance(port, like) == nearest]
        kinds = [port.kind() for port in self._ports if port in ready]
        return [port for port in ready if port.kind() == max(kinds, key=kinds.count)]

    def _unlike(self) -> set[str]:
        """The addresses of the ready engines that new work does not go to."""
        return {port.address for port in self._ready()} - {port.address for port in self._alike()}

    def _changed(self) -> None:
        """Look at all engines again: one's health has changed, or requests wait for another controller."""
        before, self._differing = self._differing, self._unlike()
        for address in self._differing - before:
            self._log.warning("an engine differs from the others", engine=address, reason=DIFFERS)
        self._reassign()

    def _reassign(self) -> None:
        """Give what waits at an engine that is lost, or has refused it, to another one that is ready.

        What is not recorded yet waits for the next look.
        """
        for port in self._ports:
            for stream in (one for one in port.held if one.recorded):
                able = (
                    self._alike() if stream.any_model else [one for one in self._ready() if one.kind() == port.kind()]
                )
                if able:
                    able[0].take_over(stream)
                    self._log.info("an open request goes on with another engine", engine=able[0].address)


def _distance(port: ZmqEnginePort, like: Manifest) -> int:
    """0 for an engine from which every bit is equal, 1 for one of the same model, 2 for another."""
    status = port.health().status
    manifest = None if status is None else status.manifest
    return 0 if manifest == like else 1 if manifest is not None and manifest.model == like.model else 2

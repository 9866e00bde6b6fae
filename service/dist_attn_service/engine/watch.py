"""The readiness of the engine, and the waiting of new requests while it restarts."""

import asyncio
import time

from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import Status
from dist_attn_service.base.errors import NO_RETRY, BadRequest, Code, EngineUnavailable, ServiceError
from dist_attn_service.base.settings import Settings
from dist_attn_service.engine.port import EngineHealth, EnginePort
from dist_attn_service.engine.served_model import ServedModel

__all__ = ["EngineWatch"]

POLL_SECONDS = 0.05
ELSEWHERE = (
    "keeps states in another store than this API, so there are no sessions, no reuse of prompts and no states of jobs; "
    "give both the same store.address and store.blobs: a folder that both hosts share, or Redis"
)


class EngineWatch:
    """A watch over the engine's health, for which at most `waiting_requests` requests wait at a time.

    `place` names the store that this process has; "" where that is not known.
    """

    def __init__(self, engine: EnginePort, model: ServedModel, settings: Settings, place: str = "") -> None:
        self._engine = engine
        self._model = model
        self._settings = settings
        self._name = f"the engine of {model.id!r}" if settings.encoder.model else "the engine"
        self._place = place
        self._missed_since: float | None = None
        self.waiting = 0

    def health(self) -> EngineHealth:
        """The engine's health; an engine that runs another model than the folder's is not ready."""
        health = self._health_of_this_model()
        if health.ready:
            self._missed_since = None
        elif self._missed_since is None:
            self._missed_since = time.monotonic()
        return health

    def _health_of_this_model(self) -> EngineHealth:
        health = self._engine.health()
        if not health.ready or health.status is None:
            return EngineHealth(False, health.reason or "the engine is not ready", health.status, health.age)
        mismatch = self._mismatch(health.status)
        return EngineHealth(False, mismatch, health.status, health.age) if mismatch else health

    def ready_status(self) -> Status:
        """The engine's status, as long as it can take work.

        Raises: EngineUnavailable with the reason when it cannot.
        """
        health = self.health()
        if not health.ready or health.status is None:
            raise self._unavailable(f"{self._name} is not ready: {health.reason}")
        return health.status

    def states(self) -> Manifest | None:
        """The manifest of the states that engine and API can hand to each other; None where there are none."""
        status = self.health().status
        return None if status is None or self.keeps_states_elsewhere(status) else status.manifest

    def keeps_states_elsewhere(self, status: Status) -> bool:
        """Return whether the engine has another store than this process."""
        return bool(status.store and self._place) and status.store != self._place

    def manifest(self) -> Manifest:
        """The manifest of the states of sessions; the engine must be ready.

        Raises: EngineUnavailable while it is not; BadRequest for a model whose states cannot be stored; ServiceError
            where the engine keeps them elsewhere.
        """
        status = self.ready_status()
        if status.manifest is not None and self.keeps_states_elsewhere(status):
            raise ServiceError(f"{self._name} {ELSEWHERE}", code=Code.STORAGE_FAILED, headers=NO_RETRY)
        manifest = status.manifest
        if manifest is None:
            raise BadRequest(
                f"{self._model.id!r} has no states of a text that could be stored, so it has no sessions; send the "
                "whole text to /v1/encodings",
                code=Code.UNSUPPORTED_PARAMETER,
                param="model",
            )
        return manifest

    async def until_ready(self) -> None:
        """Return as soon as the engine can take work; a restart takes some seconds, so this may wait as long.

        Raises: EngineUnavailable after `engine_ready_seconds`, and at once when too many wait already or when the
            engine runs another model.
        """
        if self.health().ready:
            return
        limit, seconds = self._settings.waiting_requests, self._settings.engine_ready_seconds
        if self.waiting >= limit:
            raise self._unavailable(
                f"{limit} requests wait for {self._name} already, which is this service's limit; {self.health().reason}"
            )
        deadline = time.monotonic() + seconds
        self.waiting += 1
        try:
            while not (health := self.health()).ready:
                other_model = health.status is not None and health.status.ready and self._mismatch(health.status)
                if other_model or time.monotonic() >= deadline:
                    waited = "" if other_model else f" after {seconds:g} s"
                    raise self._unavailable(f"{self._name} is not ready{waited}: {health.reason}")
                await asyncio.sleep(POLL_SECONDS)  # it becomes ready in other processes
        finally:
            self.waiting -= 1

    def _unavailable(self, message: str) -> EngineUnavailable:
        """The refusal, which asks to come back after as long as the engine has been away: that is the best guess."""
        missed = 0.0 if self._missed_since is None else time.monotonic() - self._missed_since
        return EngineUnavailable(message, retry_after_seconds=missed)

    def refusal(self, status: Status) -> str:
        """Say why an engine cannot be one of several that share their work; empty where it can."""
        elsewhere = status.manifest is not None and self.keeps_states_elsewhere(status)
        return self._mismatch(status) or (f"it {ELSEWHERE}" if elsewhere else "")

    def _mismatch(self, status: Status) -> str:
        theirs, ours = (status.vocab_size, status.hidden_size), (self._model.vocab_size, self._model.hidden_size)
        if theirs == ours:
            return ""
        return (
            f"the engine runs {status.model!r} (vocabulary and width {theirs}), this service was started "
            f"with {self._model.id!r} {ours}; start both with the same model folder"
        )

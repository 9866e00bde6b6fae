"""Everything that routes of sessions need, in one place."""

from dataclasses import dataclass
from typing import Self

from service.engine.context import ServiceContext
from service.sessions.append import AppendService
from service.sessions.catalogue import SessionCatalogue
from service.sessions.generate import GenerateService
from service.sessions.keeping import KeptStore
from service.sessions.states import SessionStates

__all__ = ["SessionDesk"]


@dataclass(frozen=True)
class SessionDesk:
    """The parts that sessions are served by."""

    kept: KeptStore
    catalogue: SessionCatalogue
    states: SessionStates
    appends: AppendService
    generations: GenerateService

    @classmethod
    def over(cls, kept: KeptStore, context: ServiceContext) -> Self:
        """The parts over one store, which is also the context's."""
        store = context.store
        return cls(
            kept,
            SessionCatalogue(store, context.model.id),
            SessionStates(store, context.settings.store.snapshot_bytes),
            AppendService(context),
            GenerateService(context),
        )

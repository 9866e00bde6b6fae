"""Everything that routes of sessions need, in one place."""

from dataclasses import dataclass
from typing import Self

from dist_attn_service.engine.context import ServiceContext
from dist_attn_service.sessions.append import AppendService
from dist_attn_service.sessions.catalogue import SessionCatalogue
from dist_attn_service.sessions.generate import GenerateService
from dist_attn_service.sessions.states import SessionStates
from dist_attn_service.sessions.store_service import StoreService


@dataclass(frozen=True)
class SessionServices:
    """The parts that sessions are served by."""

    stored: StoreService
    catalogue: SessionCatalogue
    states: SessionStates
    appends: AppendService
    generations: GenerateService

    @classmethod
    def over(cls, stored: StoreService, context: ServiceContext) -> Self:
        """The parts over one store, which is also the context's."""
        store = context.store
        return cls(
            stored,
            SessionCatalogue(store, context.model.id),
            SessionStates(store, context.settings.store.snapshot_bytes),
            AppendService(context),
            GenerateService(context),
        )

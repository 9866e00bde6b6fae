"""Everything that routes of sessions need, in one place."""

from dataclasses import dataclass
from typing import Self

from service.engine_port import EnginePort
from service.engine_watch import EngineWatch
from service.metrics import Metrics
from service.sessions.append import AppendService
from service.sessions.catalogue import SessionCatalogue
from service.sessions.generate import GenerateService
from service.sessions.keeping import KeptStore
from service.sessions.states import SessionStates
from service.settings import Settings
from service.tokenising import TokeniserPort

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
    def over(
        cls,
        kept: KeptStore,
        settings: Settings,
        engine: EnginePort,
        watch: EngineWatch,
        tokeniser: TokeniserPort,
        model: str,
        metrics: Metrics,
    ) -> Self:
        """The parts over one store and one engine; `model` is the served model's id."""
        store = kept.store
        return cls(
            kept,
            SessionCatalogue(store, model),
            SessionStates(store, settings.store.snapshot_bytes),
            AppendService(settings, engine, watch, tokeniser, store, model, metrics),
            GenerateService(settings, engine, watch, tokeniser, store, model, metrics),
        )

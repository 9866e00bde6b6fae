"""Prefixes of prompts: their states are looked up in the store, work goes on from them, and new ones are kept there.

A state is found only by its own caller, for the very same tokens, read by the same model in the same way (the whole
manifest is part of the key): with it a completion draws what it would draw if it read everything. Where anything goes
wrong the prompt is read anew.
"""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import msgspec

from dist_attn.errors import DistAttnError, QuotaError, UnknownStateError
from dist_attn.text.base import TokenArray
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import BeginState, Checkpoint
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.base.tasks import stop_tasks
from dist_attn_service.engine.run import ServiceContext, begin_from, record_state
from dist_attn_service.engine.stream import EngineStream

__all__ = ["NO_PREFIX", "SPOILT", "PrefixCache", "PromptPrefix", "kept_positions"]

SPOILT = (Code.INVALID_STATE, Code.STATE_MISMATCH, Code.STATE_DAMAGED, Code.STORAGE_FAILED)
"""The errors for a state that a completion cannot begin with."""
REST_SECONDS = 5.0  # no request waits for a store that has just failed


@dataclass(frozen=True)
class PromptPrefix:
    """The prefix of a prompt: the stored state to begin with, and the positions at which further ones shall be kept.

    `keys` are those of the `manifest`.
    """

    caller: str = ""
    keys: Mapping[int, str] = field(default_factory=dict)
    begin: BeginState | None = None
    states_at: tuple[int, ...] = ()
    manifest: Manifest | None = None


NO_PREFIX = PromptPrefix()


def kept_positions(tokens: int, grid: int, least: int) -> tuple[int, ...]:
    """The positions at which states of a prompt are kept: its last grid point, and at doubling distances from its end.

    These are the last but one multiples of the grid, of twice the grid, of four times, and so on, so that prompts that
    share much of their text share states too. A later prompt that has all but the last n tokens in common with this
    one finds a state less than 4n tokens before this one's end, or two grid steps: what is read again is in proportion
    to what is new, with as many states as the logarithm of the length. None of them holds the last token, which is
    fed with the first draw.
    """
    positions, step = {(tokens - 1) // grid * grid}, grid
    while step < tokens:
        positions.add((tokens - 1) // step * step - step)
        step *= 2
    return tuple(sorted(position for position in positions if position >= least))


@final
class PrefixCache:
    """The prefixes of one model, looked up and kept in the store; holds no states, only the tasks that keep them."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._settings = context.settings.prefixes
        self._writers = asyncio.Semaphore(self._settings.at_once)
        self._tasks: set[asyncio.Task[bool]] = set()
        self._rest_until = 0.0

    # ---- before the engine ---------------------------------------------------------------------

    async def look_up(self, caller: str | None, tokens: TokenArray) -> PromptPrefix:
        """Find the longest prefix of the prompt that is stored. Without a `caller` nothing is looked for.

        Never fails, and never takes longer than `wait_s`.
        """
        manifest = self._context.watch.states()
        if caller is None or manifest is None or not self._settings.reuse or time.monotonic() < self._rest_until:
            return NO_PREFIX
        store, grid = self._context.store, manifest.computed.chunk_tokens
        positions = kept_positions(len(tokens), grid, self._settings.min_tokens)
        if not positions:
            return NO_PREFIX
        try:
            async with asyncio.timeout(self._settings.wait_s):
                keys = await self._keys(caller, manifest, tokens, grid)
                stored = await store.prefixes.longest(caller, keys)
                begin = None if stored is None else await begin_from(store, caller, stored.position, stored.snapshot)
        except (DistAttnError, TimeoutError) as error:
            self._failed("a prefix could not be looked up", error)
            if not isinstance(error, UnknownStateError):  # one removed just now says nothing of the store
                self._rest_until = time.monotonic() + REST_SECONDS
            return NO_PREFIX
        self._context.metrics.prefix_lookup("miss" if begin is None else "hit")
        busy = len(self._tasks) >= self._context.settings.open_requests
        read = 0 if begin is None else begin.position
        later = () if busy else tuple(position for position in positions if position > read)
        return PromptPrefix(caller, dict(keys), begin, later, manifest)

    async def _keys(self, caller: str, manifest: Manifest, tokens: TokenArray, grid: int) -> list[tuple[int, str]]:
        """The keys of the prompt's prefixes, computed beside the event loop: a prompt may be long."""
        model = hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
        hasher = self._context.store.prefixes.hasher(caller, model, grid)
        whole = (len(tokens) - 1) // grid * grid
        data = tokens[:whole].astype("<i4").tobytes()
        keys = await self._context.beside(hasher.update, data)
        return [(position, key) for position, key in keys if position >= self._settings.min_tokens]

    async def restore(self, prefix: PromptPrefix, stream: EngineStream) -> bool:
        """Let a completion begin with the stored state; false when it cannot, and the prompt must be read anew."""
        begin = prefix.begin
        assert begin is not None
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await stream.restored()
        except (ServiceError, TimeoutError) as error:
            self._failed("a prefix could not be gone on from", error)
            if isinstance(error, ServiceError) and error.code in SPOILT and not self._sound_for_others(prefix, error):
                await self._forget(prefix.caller, prefix.keys[begin.position])
            return False
        self._context.metrics.prefix_tokens(begin.position)
        return True

    def _sound_for_others(self, prefix: PromptPrefix, error: ServiceError) -> bool:
        """Return whether the state may be sound for one of several engines: others do not take it."""
        every = self._context.engine.engines().values()
        other = any(health.status and health.status.manifest != prefix.manifest for health in every)
        return other and error.code == Code.STATE_MISMATCH

    async def _forget(self, caller: str, key: str) -> None:
        """Drop a prefix whose state cannot be used, so that it is not found again."""
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await self._context.store.prefixes.forget(caller, key)
        except (DistAttnError, TimeoutError) as error:
            self._context.log.warning("a prefix could not be dropped", error=str(error) or "it took too long")

    def _failed(self, what: str, error: Exception) -> None:
        self._context.metrics.prefix_lookup("failed")
        self._context.log.warning(what, error=str(error) or "it took too long")

    # ---- beside the engine ---------------------------------------------------------------------

    def keep(self, prefix: PromptPrefix, stream: EngineStream) -> None:
        """Record the states of a completion's prompt as the engine stores them; the completion does not wait for it."""
        before: asyncio.Task[bool] | None = None

        def on_state(state: Checkpoint) -> None:
            nonlocal before
            before = asyncio.create_task(self._keep(prefix, state, before), name="prefix-keep")
            self._tasks.add(before)
            before.add_done_callback(self._tasks.discard)

        stream.on_state = on_state

    async def _keep(self, prefix: PromptPrefix, state: Checkpoint, before: asyncio.Task[bool] | None) -> bool:
        """Record a state after the one `before`, unless that one could not be; return whether this one is."""
        caller, position, store = prefix.caller, state.position, self._context.store
        if before is not None and not await before:
            await store.snapshots.discard(state.blob)
            return False
        try:
            async with self._writers, asyncio.timeout(self._settings.keep_s):
                name = await record_state(store, caller, state, spare=True)
                await store.prefixes.remember(caller, prefix.keys[position], position, name)
        except QuotaError:
            self._context.metrics.prefix_state("no_room")
            return False
        except (DistAttnError, TimeoutError) as error:
            self._context.metrics.prefix_state("failed")
            self._context.log.warning("a prefix was not kept", error=str(error) or "it took too long")
            return False
        self._context.metrics.prefix_state("kept")
        return True

    async def close(self) -> None:
        """Cancel the tasks that still record states."""
        await stop_tasks(*self._tasks)

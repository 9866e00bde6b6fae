"""Estimates of work if it were sent now: tokens, seconds, memory and bytes, and where each figure comes from."""

import math
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from dist_attn.costs import Estimate as Plan
from dist_attn.costs import LanguageModelCosts, ModelCosts, OutputFormat, estimate, output_bytes, read_any_costs
from dist_attn.errors import ConfigError
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.specs import tokens_with_room
from dist_attn_api.types import Estimate, Figure, MemoryEstimate
from dist_attn_service.encodings.encoding_run import count_rows
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.engine.workload import TextRatio

__all__ = ["PIECES", "EstimateService", "Size"]

T = TypeVar("T")
FORMATS: tuple[OutputFormat, ...] = ("ndjson", "arrow", "npy")
PIECES = 16  # that a sample is cut into, to see how they differ
FEW_BYTES = 1 << 16  # less text says little about other texts
PLANNED_SPREAD = 0.75  # the planner's rates are for one core of no particular machine
ASSUMED_SPREAD = 0.5  # how much any text may differ from the one below
ASSUMED_TEXT = b"""It was a cold morning in March when the surveyor first came down to the harbour, with 3 crates of
instruments and a letter from the company. Nobody had expected him before the thaw. "You will want a room," said the
keeper's wife, "and somebody who knows the ice." He answered that he wanted both, at once, and paid for a month.
"""


@dataclass(frozen=True)
class Size:
    """The size of a text: in tokens, in bytes, by itself, or in bytes beside a sample of it."""

    tokens: int | None = None
    size: int | None = None
    text: bytes | None = None


class EstimateService:
    """The service that estimates work by what was measured and, before that, by the planner's formulas."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._costs: ModelCosts | None = None
        self._costs_read = False

    async def estimate(self, size: Size, spec: RowSpec, max_tokens: int | None) -> Estimate:
        """An estimate of an encoding, or with `max_tokens` of a completion."""
        tokens = await self.tokens(size)
        count = round(tokens.value)
        status = self._context.watch.health().status
        ranks = None if status is None else max(1, len(status.ranks))
        plan = await self._plan(max(1, count), ranks or 1, spec.window)
        seconds, notes = self._seconds(tokens, plan)
        if max_tokens is not None:
            seconds = _plus(seconds, max_tokens / (plan.decode_tokens_per_second or math.inf) if plan else 0.0)
            notes.append("tokens that are drawn count by the planner's rates, all of max_tokens")
        queue = self.queue_seconds(tokens, seconds)
        rows = 0 if max_tokens is not None else count_rows(spec, count)
        memory = None if plan is None else MemoryEstimate(**asdict(plan.memory), peak=plan.memory.peak)
        if plan is None and status is not None and status.state_bytes is not None:
            state = status.state_bytes + status.token_bytes * tokens_with_room(count + (max_tokens or 0))
            notes.append(f"the state of this text will take up to {state:,} bytes in a rank that draws from it")
        if ranks is None:
            notes.append("the engine is not reached, so figures are for one rank")
        dim = self._context.model.hidden_size
        return Estimate(
            model=self._context.model.id,
            ranks=ranks,
            tokens=tokens,
            rows=rows,
            seconds=seconds,
            queue_seconds=round(queue, 3),
            total_seconds=_rounded(_plus(seconds, queue)),
            memory_bytes_per_rank=memory,
            output_bytes={} if max_tokens is not None else {name: output_bytes(rows, dim, name) for name in FORMATS},
            notes=notes,
        )

    async def tokens(self, size: Size) -> Figure:
        """Estimate or count the tokens of a text."""
        if size.tokens is not None:
            return _exact(size.tokens, "given")
        if size.text is not None and size.size in (None, len(size.text)):
            return _exact(await self._count(size.text), "counted")
        total = size.size or 0
        if size.text:
            ratio = (await self._sampled(size.text)).measured()
            if ratio is not None:
                return _around(total * ratio.tokens_per_byte, ratio.spread, "sample")
        lately = self._context.workload.ratio.measured(FEW_BYTES)
        if lately is not None:
            return _around(total * lately.tokens_per_byte, lately.spread, "measured")
        assumed = (await self._sampled(ASSUMED_TEXT)).measured()
        if assumed is None:
            return _around(total / 4, ASSUMED_SPREAD, "planned")
        return _around(total * assumed.tokens_per_byte, ASSUMED_SPREAD if assumed.spread else 0.0, "planned")

    async def delay(self, size: Size) -> tuple[float, float]:
        """The time that work would wait for other work under way, and the time it would take with that.

        Units: seconds; 0 and 0 before anything was measured.
        """
        speed = self._context.workload.speed.measured()
        if speed is None:
            return 0.0, 0.0
        tokens = (await self.tokens(size)).value
        queue = self._context.workload.tokens_before(tokens) / speed.tokens_per_second
        return queue, queue + tokens / speed.tokens_per_second

    def queue_seconds(self, tokens: Figure, seconds: Figure) -> float:
        """The seconds that other work under way adds to this work."""
        if tokens.value <= 0:
            return 0.0
        return self._context.workload.tokens_before(tokens.value) * seconds.value / tokens.value

    def _seconds(self, tokens: Figure, plan: Plan | None) -> tuple[Figure, list[str]]:
        """Estimate the seconds that reading alone takes; notes say where that is uncertain."""
        notes: list[str] = []
        speed = self._context.workload.speed.measured()
        spread = (tokens.high - tokens.low) / 2 / tokens.value if tokens.value else 0.0
        if speed is not None:
            return _around(tokens.value / speed.tokens_per_second, speed.spread + spread, "measured"), notes
        notes.append(
            "no document has been read since this service started: seconds are by the planner's rates, and may be far "
            "off" + "; `dist-attn plan --measure` measures them" * isinstance(self._costs, LanguageModelCosts)
        )
        if plan is None:
            notes.append("for this kind of model there are no formulas, so seconds are unknown and stand as 0")
            return _around(0.0, 0.0, "planned"), notes
        return _around(plan.prefill_seconds, PLANNED_SPREAD + spread, "planned"), notes

    async def _sampled(self, text: bytes) -> TextRatio:
        """The ratio of tokens to bytes of a sample, over pieces of it."""
        ratio = TextRatio()
        step = max(1, -(-len(text) // PIECES))
        for start in range(0, len(text), step):
            part = text[start : start + step]
            ratio.add(await self._count(part), len(part))
        return ratio

    async def _count(self, text: bytes) -> int:
        return len(await self._context.tokeniser.tokens(text))

    async def _plan(self, tokens: int, ranks: int, window: int) -> Plan | None:
        if not self._costs_read:
            try:
                self._costs = await self._context.beside(read_any_costs, self._context.settings.model)
            except ConfigError:
                self._costs = None  # a kind of model that has no formulas
            self._costs_read = True
        costs = self._costs
        if costs is None:
            return None
        status = self._context.watch.health().status
        if status is not None and status.manifest is not None and isinstance(costs, LanguageModelCosts):
            costs = replace(costs, weights=status.manifest.model.weight_precision)
        return await self._context.beside(estimate, costs, tokens, ranks=ranks, window=window)


def _exact(count: int, source: str) -> Figure:
    return Figure(value=count, low=count, high=count, source=source)


def _around(value: float, spread: float, source: str) -> Figure:
    low, high = value * max(0.0, 1 - spread), value * (1 + spread)
    return _rounded(Figure(value=value, low=low, high=high, source=source))


def _plus(one: Figure, seconds: float) -> Figure:
    return Figure(value=one.value + seconds, low=one.low + seconds, high=one.high + seconds, source=one.source)


def _rounded(one: Figure) -> Figure:
    return Figure(value=round(one.value, 3), low=round(one.low, 3), high=round(one.high, 3), source=one.source)

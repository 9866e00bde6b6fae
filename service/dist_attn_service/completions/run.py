"""A completion in the engine: stored states and prompts in, and the text of each choice as it is drawn, or whole."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean

import msgspec

from dist_attn.wire.messages import BeginState, Generated, Keep, OpenWork, Progress, Rows
from dist_attn_api.types import Choice, Completion, CompletionUsage, PromptProgress, PromptTokensDetails
from dist_attn_service.base.errors import EngineFailure, ServiceError
from dist_attn_service.base.tasks import task_group
from dist_attn_service.completions.prefixes import NO_PREFIX, SPOILT, PrefixCache, PromptPrefix
from dist_attn_service.completions.prepared import PlannedChoice, PreparedCompletion
from dist_attn_service.engine.metrics import DrawingTimes
from dist_attn_service.engine.port import EngineKind
from dist_attn_service.engine.run import EngineRun, ServiceContext
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.text.choice_text import (
    ChoiceText,
    FinishReason,
    PromptText,
    ScoredToken,
    choice_logprobs,
    finish_reason,
)

DELTAS_WAITING = 64


@dataclass(frozen=True)
class Delta:
    """More text of one choice; `finish_reason` stands on its last one only."""

    index: int
    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    processed: int | None = None  # the prompt's tokens that have been read, of a delta that tells only this


class ChoiceRun:
    """One choice in the engine. It may begin with a stored state that some `cached` tokens of the prompt are in."""

    def __init__(
        self,
        context: ServiceContext,
        prepared: PreparedCompletion,
        planned: PlannedChoice,
        prefix: PromptPrefix,
        name: str,
        only: EngineKind | None = None,
    ) -> None:
        self._context = context
        self._terms = prepared.terms
        self._planned = planned
        self._prefix = prefix
        self._name = name
        self._only = only
        self._prompt: PromptText | None = None
        self._times = DrawingTimes(context.metrics)
        offset, min_tokens, lead = len(planned.prompt.echo), planned.sampling.min_tokens, prepared.lead
        self._text = ChoiceText(context.tokeniser, prepared.stops, offset=offset, min_tokens=min_tokens, lead=lead)
        self.cached = prefix.begin.position if prefix.begin else 0
        self.stream = self._opened(prefix.begin, Keep(at=prefix.states_at))

    def _opened(self, begin: BeginState | None, keep: Keep) -> EngineStream:
        terms = replace(self._terms, progress=True).for_engine(len(self._planned.prompt.tokens))
        work = OpenWork(self._name, begin, None, self._planned.sampling, keep, terms)
        stream = self._context.engine.open(work, self._prefix.manifest, self._only)
        stream.stands_for(self._planned.prompt.tokens[: begin.position if begin else 0])
        return stream

    @property
    def drawn(self) -> int:
        """The number of tokens of its text so far; those after a stop string do not count."""
        return self._text.drawn

    def close(self) -> None:
        """End the choice in the engine."""
        self.stream.close()

    async def begin(self, prefixes: PrefixCache) -> None:
        """Wait until the engine has the choice, and the state to begin with; without that it reads the whole prompt.

        Raises: ServiceError when the engine does not take it.
        """
        admission_seconds = self._context.settings.admission_seconds
        try:
            await self.stream.admitted(admission_seconds)
        except ServiceError as error:
            if self._prefix.begin is None or error.code not in SPOILT:
                raise
        if self._prefix.begin is None or await prefixes.restore(self._prefix, self.stream):
            return
        self.stream.close()
        self.cached = 0
        self.stream = self._opened(None, Keep())
        await self.stream.admitted(admission_seconds)

    async def work(self, deltas: "asyncio.Queue[Delta]") -> None:
        """Send the prompt as credit allows, and put what is drawn into `deltas`.

        Raises: ServiceError when the engine fails.
        """
        index, prompt, scores = self._planned.index, self._planned.prompt, self._planned.sampling.prompt_logprobs
        scored: tuple[ScoredToken, ...] = ()
        if scores is not None:
            self._prompt = await PromptText.of(self._context.tokeniser, prompt.tokens)
            scored = (self._prompt.first(),)
        if prompt.echo or scored:
            await deltas.put(Delta(index, prompt.echo, scored))
        ended = False

        async def on_rows(rows: Rows) -> None:
            await deltas.put(await self._scores(rows))

        async def on_tokens(event: Generated) -> None:
            nonlocal ended
            delta = self._take(event)
            ended = delta.finish_reason is not None
            self._times.drawn(len(event.tokens), ended=ended)
            await deltas.put(delta)
            if ended:
                self.stream.close()

        async def on_progress(event: Progress) -> None:
            self._times.read()
            if self._terms.progress:
                await deltas.put(Delta(index, "", processed=event.processed))

        await EngineRun(self.stream, on_rows, on_tokens, on_progress).work(prompt.tokens[self.cached :])
        if not ended:
            raise EngineFailure("the engine ended a completion before its last token")

    async def _scores(self, rows: Rows) -> Delta:
        """The log-probabilities of the prompt's next tokens; their text was handed on before."""
        count = self._planned.sampling.prompt_logprobs
        if self._prompt is None or count is None:
            raise EngineFailure("the engine answered a completion with rows")
        return Delta(self._planned.index, "", tuple(await self._prompt.scored(rows, count)))

    def _take(self, event: Generated) -> Delta:
        """The text of newly drawn tokens; the log-probability of the end token may follow theirs."""
        logprobs, end = event.logprobs or [], None
        if event.finish_reason == "stop" and len(logprobs) == len(event.tokens) + 1:
            *logprobs, end = logprobs
            event = msgspec.structs.replace(event, logprobs=logprobs)
        text = self._text.take(event, asked=self._planned.sampling.logprobs is not None)
        reason = finish_reason(event)
        if reason is not None and self._prompt is not None and not self._prompt.whole:
            raise EngineFailure("the engine ended a completion before it had sent the scores of its prompt")
        if reason is not None and not self._text.stopped:
            if end is not None and event.end_token is not None:
                self._text.end(event.end_token, end)
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        return Delta(self._planned.index, text, tuple(self._text.take_scored()), reason)


class CompletionRun:
    """A completion in the engine: take deltas of its choices, as they come, until none is left."""

    def __init__(self, prepared: PreparedCompletion, choices: list[ChoiceRun], deltas: "asyncio.Queue[Delta]") -> None:
        self.prepared = prepared
        self._choices = choices
        self._deltas = deltas
        self._left = len(choices)
        self._began = time.monotonic()
        self._processed = [0] * len(choices)

    @property
    def progress(self) -> PromptProgress:
        """The tokens of the prompts that have been read; every choice reads its own prompt."""
        total = sum(len(planned.prompt.tokens) for planned in self.prepared.choices)
        took = round(1000 * (time.monotonic() - self._began))
        cached = [choice.cached for choice in self._choices]
        done = sum(map(max, cached, self._processed))
        return PromptProgress(total=total, cache=sum(cached), processed=done, time_ms=took)

    @property
    def finished(self) -> bool:
        """Return whether every choice has had its finish reason."""
        return self._left == 0

    @property
    def usage(self) -> CompletionUsage:
        """Tokens so far; tokens drawn after a stop string are not counted."""
        prompt, drawn = self.prepared.prompt_tokens, sum(choice.drawn for choice in self._choices)
        # A prompt counts once, and so do its cached tokens: the fewest that any of its choices had.
        cached = [len(prompt.tokens) for prompt in self.prepared.prompts]
        for choice, planned in zip(self._choices, self.prepared.choices, strict=True):
            cached[planned.place] = min(cached[planned.place], choice.cached)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=drawn,
            total_tokens=prompt + drawn,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(cached)),
        )

    async def next(self) -> Delta:
        """The next piece of text of any choice, possibly empty."""
        delta = await self._deltas.get()
        self._left -= delta.finish_reason is not None
        if delta.processed is not None:
            # Tokens that are read again, for another controller, do not lower the count.
            self._processed[delta.index] = max(self._processed[delta.index], delta.processed)
        return delta


class CompletionService:
    """The service that runs completions; holds what they share, nothing of any one of them."""

    def __init__(self, context: ServiceContext, prefixes: PrefixCache) -> None:
        self._context = context
        self._prefixes = prefixes

    @asynccontextmanager
    async def open(self, prepared: PreparedCompletion, name: str) -> AsyncIterator[CompletionRun]:
        """Hand the completion to the engine; leaving early cancels all of it there.

        `name` is the request's id in the log.

        Raises: ServiceError when the engine does not take it, or fails.
        """
        await self._context.watch.until_ready()
        prefixes = await self._look_up(prepared)
        # Engines of one kind draw all choices.
        only = self._context.engine.kind(prefixes[0].manifest) if len(prefixes) > 1 else None
        with ExitStack() as opened:
            choices = []
            for planned, prefix in zip(prepared.choices, prefixes, strict=True):
                choice = ChoiceRun(self._context, prepared, planned, prefix, name, only)
                opened.callback(choice.close)
                if prefix.states_at:
                    self._prefixes.keep(prefix, choice.stream)
                choices.append(choice)
            for choice in choices:
                await choice.begin(self._prefixes)
            deltas: asyncio.Queue[Delta] = asyncio.Queue(DELTAS_WAITING)
            async with task_group() as group:
                for choice in choices:
                    group.create_task(choice.work(deltas))
                yield CompletionRun(prepared, choices, deltas)

    async def gather(
        self,
        prepared: PreparedCompletion,
        name: str,
        *,
        counted: Callable[[CompletionUsage], None],
        drawn: Callable[[CompletionUsage], None] = lambda _: None,
    ) -> tuple[list["Gathered"], CompletionUsage]:
        """Draw a completion to its end: the choices that are answered, and its tokens. `counted` is told what was read
        and drawn, however it ends; `drawn` on the way.

        Raises: as `open`.
        """
        choices = [Gathered(prepared.logprobs, planned) for planned in prepared.choices]
        async with self.open(prepared, name) as run:
            try:
                while not run.finished:
                    delta = await run.next()
                    choices[delta.index].add(delta)
                    drawn(run.usage)
            finally:
                counted(run.usage)
        return _best(prepared, choices), run.usage

    async def _look_up(self, prepared: PreparedCompletion) -> list[PromptPrefix]:
        """The prefix of each choice. All choices of a prompt have the same one, and the first one's states are kept.

        A prompt that is scored is read from its first token on: tokens that are not read have no scores.
        """
        if any(planned.sampling.prompt_logprobs is not None for planned in prepared.choices):
            return [NO_PREFIX] * len(prepared.choices)
        prefixes = await asyncio.gather(
            *(self._prefixes.look_up(prepared.caller, prompt.tokens) for prompt in prepared.prompts)
        )
        of_choices, seen = [], set()
        for planned in prepared.choices:
            prefix = prefixes[planned.place]
            of_choices.append(replace(prefix, states_at=()) if planned.place in seen else prefix)
            seen.add(planned.place)
        return of_choices


# ---- whole ---------------------------------------------------------------------------------------


class Gathered:
    """The deltas of one choice, put together."""

    def __init__(self, logprobs: int | None, planned: PlannedChoice) -> None:
        self._logprobs = logprobs
        self._prompt_tokens = 0 if planned.sampling.prompt_logprobs is None else len(planned.prompt.tokens)
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    @property
    def score(self) -> float:
        """The mean log-probability of its drawn tokens; a text without any is the worst."""
        values = [token.logprob for token in self.scored[self._prompt_tokens :] if token.logprob is not None]
        return fmean(values) if values else -inf

    @property
    def text(self) -> str:
        """The whole text of the choice."""
        return "".join(delta.text for delta in self._deltas)

    @property
    def scored(self) -> list[ScoredToken]:
        """The tokens of the choice, where log-probabilities were asked for."""
        return [token for delta in self._deltas for token in delta.scored]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._deltas[-1].finish_reason

    def whole(self, index: int) -> Choice:
        """The choice as a completion answers it."""
        logprobs = choice_logprobs(self.scored, self._logprobs)
        return Choice(index=index, text=self.text, logprobs=logprobs, finish_reason=self.finish_reason)


def _best(prepared: PreparedCompletion, choices: list[Gathered]) -> list[Gathered]:
    """The choices to answer: of each prompt the wanted number, the likeliest first where more were drawn."""
    drawn = len(choices) // len(prepared.prompts)
    if drawn == prepared.answered:
        return choices
    groups = [choices[at : at + drawn] for at in range(0, len(choices), drawn)]
    return [
        choice
        for group in groups
        for choice in sorted(group, key=lambda choice: choice.score, reverse=True)[: prepared.answered]
    ]


def whole_completion(
    prepared: PreparedCompletion, model: str, choices: list[Gathered], usage: CompletionUsage
) -> Completion:
    """The answer in OpenAI's form."""
    return Completion(
        id=prepared.id,
        created=prepared.created,
        model=model,
        choices=[choice.whole(index) for index, choice in enumerate(choices)],
        usage=usage,
    )

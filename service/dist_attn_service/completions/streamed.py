"""Completions through the engine: prompts -> tokens -> stored states -> the choices of each, as they are drawn."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import BeginState, Keep, OpenWork, SamplingSpec
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.base.parsing import parse_drawing, parse_texts
from dist_attn_service.base.request_terms import RequestTerms
from dist_attn_service.base.tasks import task_group
from dist_attn_service.completions.choice_run import ChoiceRun, Delta, PlannedChoice, Prompt
from dist_attn_service.completions.prefixes import NO_PREFIX, PrefixCache, PromptPrefix
from dist_attn_service.engine.context import ServiceContext
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.schemas.completions import (
    CompletionRequest,
    CompletionUsage,
    PromptProgress,
    PromptTokensDetails,
)
from dist_attn_service.text.tokenising import tokens_of

__all__ = ["CompletionRun", "CompletionService", "PreparedCompletion"]

DELTAS_WAITING = 64
MOST_SCORES = 1 << 17  # log-probabilities of prompts in one answer, which is in memory as a whole


@dataclass(frozen=True)
class PreparedCompletion:
    """A checked request: what the engine needs and how its tokens become text.

    Of the `choices` of each prompt `wanted` are answered: all of them, or the likeliest (`best_of`).
    """

    prompts: tuple[Prompt, ...]
    choices: tuple[PlannedChoice, ...]
    stops: tuple[str, ...]
    logprobs: int | None = None
    wanted: int = 1
    terms: RequestTerms = field(default_factory=RequestTerms)
    caller: str | None = None  # whose stored prefixes may be used; None: nobody's
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices continue it."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


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
        """How far the prompts have been read; every choice reads its own."""
        total = sum(len(planned.prompt.tokens) for planned in self.prepared.choices)
        took = round(1000 * (time.monotonic() - self._began))
        cached = [choice.cached for choice in self._choices]
        done = sum(map(max, cached, self._processed))
        return PromptProgress(total=total, cache=sum(cached), processed=done, time_ms=took)

    @property
    def finished(self) -> bool:
        """Whether every choice has had its finish reason."""
        return self._left == 0

    @property
    def usage(self) -> CompletionUsage:
        """Tokens so far; tokens drawn after a stop string are not counted."""
        prompt, drawn = self.prepared.prompt_tokens, sum(choice.drawn for choice in self._choices)
        # As a prompt counts once, so does what it needed not to be read: the least of what its choices were spared.
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
            # What is read again, for another controller, does not take anything back.
            self._processed[delta.index] = max(self._processed[delta.index], delta.processed)
        return delta


class CompletionService:
    """Prepares and runs completions; holds what they share, nothing of any one of them."""

    def __init__(self, context: ServiceContext, prefixes: PrefixCache) -> None:
        self._context = context
        self._prefixes = prefixes

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """Check the options and tokenise the prompts.

        Raises: BadRequest naming the parameter.
        """
        limits = self._context.settings
        vocab_size = self._context.tokeniser.vocab_size
        sampling, stops = parse_drawing(
            request, limits, vocab_size, max_tokens=request.max_tokens, logprobs=request.logprobs
        )
        if not sampling.max_tokens and not request.echo:
            raise BadRequest("max_tokens=0 draws nothing; send echo=true with it, or at least 1", param="max_tokens")
        if request.stream_options is not None and not request.stream:
            raise BadRequest("stream_options needs stream=true", param="stream_options")
        if request.return_progress and not request.stream:
            raise BadRequest("return_progress needs stream=true", param="return_progress")
        texts = parse_texts(request.prompt, "prompt", vocab_size, limits.max_choices)
        n = request.n or 1
        drawn = self._drawn_per_prompt(request, n, len(texts))
        if request.logprobs is None and drawn > n:  # the best of several choices are the likeliest ones
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        if request.echo:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.logprobs)
        prompts = [await self._prompt(text, echo=bool(request.echo)) for text in texts]
        if sampling.prompt_logprobs is not None:
            _check_scores(drawn * sum(len(prompt.tokens) for prompt in prompts), sampling.prompt_logprobs)
        choices = [
            PlannedChoice(place * drawn + number, prompt, _of_choice(sampling, number), place)
            for place, prompt in enumerate(prompts)
            for number in range(drawn)
        ]
        return PreparedCompletion(
            tuple(prompts), tuple(choices), stops, request.logprobs, n, RequestTerms.of_body(request)
        )

    @asynccontextmanager
    async def open(self, prepared: PreparedCompletion, name: str) -> AsyncIterator[CompletionRun]:
        """Hand the completion to the engine; leaving early cancels all of it there.

        `name` is the request's in the log.

        Raises: ServiceError when the engine does not take it, or fails.
        """
        await self._context.watch.until_ready()
        prefixes = await self._look_up(prepared)
        with ExitStack() as opened:
            choices = [
                self._opened(planned, prefixes[planned.index], prepared, name, opened) for planned in prepared.choices
            ]
            for choice in choices:
                await choice.begin(self._prefixes, self._context.settings.admission_seconds)
            deltas: asyncio.Queue[Delta] = asyncio.Queue(DELTAS_WAITING)
            async with task_group() as group:
                for choice in choices:
                    group.create_task(choice.work(deltas))
                yield CompletionRun(prepared, choices, deltas)

    async def _look_up(self, prepared: PreparedCompletion) -> list[PromptPrefix]:
        """What each choice begins with. All choices of a prompt begin alike, and the first one's states are kept.

        A prompt that is scored is read from its first token on: what is not read has no scores.
        """
        if any(planned.sampling.prompt_logprobs is not None for planned in prepared.choices):
            return [NO_PREFIX] * len(prepared.choices)
        found = await asyncio.gather(
            *(self._prefixes.look_up(prepared.caller, prompt.tokens) for prompt in prepared.prompts)
        )
        of_choices, seen = [], set()
        for planned in prepared.choices:
            prefix = found[planned.place]
            of_choices.append(replace(prefix, states_at=()) if planned.place in seen else prefix)
            seen.add(planned.place)
        return of_choices

    def _opened(
        self, planned: PlannedChoice, prefix: PromptPrefix, prepared: PreparedCompletion, name: str, opened: ExitStack
    ) -> ChoiceRun:
        def open_stream(begin: BeginState | None, keep: Keep) -> EngineStream:
            terms = prepared.terms.for_engine(len(planned.prompt.tokens))
            return self._context.engine.open(OpenWork(name, begin, None, planned.sampling, keep, terms))

        choice = ChoiceRun(planned, prefix, open_stream, self._context.tokeniser, prepared.stops)
        opened.callback(choice.close)
        if prefix.states_at:
            self._prefixes.keep(prefix, choice.stream)
        return choice

    def _drawn_per_prompt(self, request: CompletionRequest, n: int, prompts: int) -> int:
        """How many choices are drawn for each prompt: `n`, or `best_of` of which the `n` best are answered."""
        drawn, name = (n, "n") if request.best_of is None else (request.best_of, "best_of")
        if drawn < n:
            raise BadRequest(f"best_of={drawn} is less than n={n}; send at least that, or leave it out", param=name)
        if drawn > n and request.stream:
            raise BadRequest(
                f"best_of={drawn} with stream: which choices are best is known at the end only; leave stream out, or "
                "best_of",
                param=name,
            )
        if drawn * prompts > self._context.settings.max_choices:
            raise BadRequest(
                f"{name}={drawn} of {prompts} prompts makes {drawn * prompts} choices; one request may ask for "
                f"{self._context.settings.max_choices}",
                param=name,
            )
        return drawn

    async def _prompt(self, text: bytes | TokenArray, *, echo: bool) -> Prompt:
        if isinstance(text, bytes):
            tokens = await tokens_of(self._context.tokeniser, text, self._context.settings.piece_bytes)
            return Prompt(tokens, text.decode() if echo else "")
        return Prompt(text, await self._context.tokeniser.text(text) if echo else "")


def _check_scores(tokens: int, likeliest: int) -> None:
    """Raises: BadRequest for more log-probabilities of prompts than an answer may hold."""
    if tokens * (1 + likeliest) > MOST_SCORES:
        raise BadRequest(
            f"echo with logprobs={likeliest} makes {tokens * (1 + likeliest)} log-probabilities of {tokens} prompt "
            f"tokens, which count for each choice; one answer holds {MOST_SCORES}: send shorter texts or fewer of them",
            param="logprobs",
        )


def _of_choice(sampling: SamplingSpec, number: int) -> SamplingSpec:
    """The sampling of choice `number` of a prompt: the first draws what it would draw alone, the others differ."""
    if sampling.seed is None or number == 0:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed} {number}".encode()).digest()
    return msgspec.structs.replace(sampling, seed=int.from_bytes(digest[:8], "little", signed=True))

"""Completions through the engine: prompts -> tokens -> controller -> drawn tokens -> the text of each choice."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dist_attn.errors import TokenError
from dist_attn.wire.messages import Generated, Progress, SamplingSpec, TokenLogprobs
from service.choice_text import ChoiceText, ScoredToken
from service.engine_port import EnginePort
from service.engine_stream import EngineStream, TokenArray
from service.engine_watch import EngineWatch
from service.errors import BadRequest, EngineFailure
from service.exchange import task_group
from service.parsing import parse_bias, parse_texts, refuse_unsupported
from service.request_terms import RequestTerms
from service.schemas import CompletionRequest, CompletionUsage, PromptProgress
from service.settings import Settings
from service.tokenising import TokeniserPort, tokens_of

__all__ = ["CompletionRun", "CompletionService", "Delta", "FinishReason", "PreparedCompletion"]

DEFAULT_MAX_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0
DELTAS_WAITING = 64
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """What a choice continues; `echo` is its text when that is to stand before the continuation."""

    tokens: TokenArray
    echo: str = ""


@dataclass(frozen=True)
class PlannedChoice:
    """One of the texts that were asked for."""

    index: int
    prompt: Prompt
    sampling: SamplingSpec


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
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices continue it."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


@dataclass(frozen=True)
class Delta:
    """More text of one choice; `finish_reason` stands on its last one only."""

    index: int
    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    processed: int | None = None  # where it says nothing but how far the prompt has been read


class _ChoiceRun:
    """One choice in the engine."""

    def __init__(
        self, planned: PlannedChoice, stream: EngineStream, tokeniser: TokeniserPort, stops: tuple[str, ...]
    ) -> None:
        self._planned = planned
        self._text = ChoiceText(tokeniser, stops, offset=len(planned.prompt.echo))
        self.stream = stream
        self.drawn = 0

    async def work(self, deltas: "asyncio.Queue[Delta]") -> None:
        """Send the whole prompt as credit allows, then hand on what is drawn.

        Raises: ServiceError when the engine fails.
        """
        if self._planned.prompt.echo:
            await deltas.put(Delta(self._planned.index, self._planned.prompt.echo))
        await self.stream.send(self._planned.prompt.tokens, final=True)
        reason = None
        while reason is None:
            delta = self._take(await self.stream.next())
            reason = delta.finish_reason
            await deltas.put(delta)
        self.stream.close()

    def _take(self, event: object) -> Delta:
        if isinstance(event, Progress):
            return Delta(self._planned.index, "", processed=event.processed)
        if not isinstance(event, Generated):
            raise EngineFailure("the engine answered a completion with rows")
        told: Sequence[TokenLogprobs | None] = event.logprobs or [None] * len(event.tokens)
        asked = self._planned.sampling.logprobs is not None
        if len(told) != len(event.tokens) or (asked and event.tokens and not event.logprobs):
            raise EngineFailure(f"the engine sent {len(told)} log-probabilities with {len(event.tokens)} tokens")
        text, reason = "", _reason(event)
        for token, logprobs in zip(event.tokens, told, strict=True):
            self.drawn += 1
            try:
                text += self._text.push(token, logprobs)
            except TokenError as error:
                raise EngineFailure(f"the engine drew a token that the tokeniser does not have: {error}") from None
            if self._text.stopped:
                break
        if reason is not None and not self._text.stopped:
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        return Delta(self._planned.index, text, tuple(self._text.take_scored()), reason)


class CompletionRun:
    """A completion in the engine: take deltas of its choices, as they come, until none is left."""

    def __init__(self, prepared: PreparedCompletion, choices: list[_ChoiceRun], deltas: "asyncio.Queue[Delta]") -> None:
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
        return PromptProgress(total=total, cache=0, processed=sum(self._processed), time_ms=took)

    @property
    def finished(self) -> bool:
        """Whether every choice has had its finish reason."""
        return self._left == 0

    @property
    def usage(self) -> CompletionUsage:
        """Tokens so far; tokens drawn after a stop string are not counted."""
        prompt, drawn = self.prepared.prompt_tokens, sum(choice.drawn for choice in self._choices)
        return CompletionUsage(prompt_tokens=prompt, completion_tokens=drawn, total_tokens=prompt + drawn)

    async def next(self) -> Delta:
        """The next piece of text of any choice, possibly empty."""
        delta = await self._deltas.get()
        self._left -= delta.finish_reason is not None
        if delta.processed is not None:
            self._processed[delta.index] = delta.processed
        return delta


class CompletionService:
    """Prepares and runs completions; holds what they share, nothing of any one of them."""

    def __init__(self, settings: Settings, engine: EnginePort, watch: EngineWatch, tokeniser: TokeniserPort) -> None:
        self._settings = settings
        self._engine = engine
        self._watch = watch
        self._tokeniser = tokeniser

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """Check the options and tokenise the prompts.

        Raises: BadRequest naming the parameter.
        """
        refuse_unsupported(request)
        limits = self._settings
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        _at_most("max_tokens", max_tokens, limits.max_tokens)
        _at_most("logprobs", request.logprobs or 0, limits.max_logprobs)
        if request.stream_options is not None and not request.stream:
            raise BadRequest("stream_options needs stream=true", param="stream_options")
        if request.return_progress and not request.stream:
            raise BadRequest("return_progress needs stream=true", param="return_progress")
        stops = self._stops(request.stop)
        texts = parse_texts(request.prompt, "prompt", self._tokeniser.vocab_size, limits.max_choices)
        n = request.n or 1
        drawn = self._drawn_per_prompt(request, n, len(texts))
        sampling = SamplingSpec(
            max_tokens=max_tokens,
            temperature=DEFAULT_TEMPERATURE if request.temperature is None else float(request.temperature),
            top_k=request.top_k or 0,
            top_p=1.0 if request.top_p is None else float(request.top_p),
            seed=request.seed,
            # the best of several choices are the likeliest ones
            logprobs=0 if request.logprobs is None and drawn > n else request.logprobs,
            presence_penalty=float(request.presence_penalty or 0),
            frequency_penalty=float(request.frequency_penalty or 0),
            logit_bias=parse_bias(request.logit_bias, self._tokeniser.vocab_size),
        )
        prompts = [await self._prompt(text, echo=bool(request.echo)) for text in texts]
        choices = [
            PlannedChoice(place * drawn + number, prompt, _of_choice(sampling, number))
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
        await self._watch.until_ready()
        with ExitStack() as streams:
            choices = []
            for planned in prepared.choices:
                terms = prepared.terms.for_engine(len(planned.prompt.tokens))
                stream = streams.enter_context(self._engine.open(planned.sampling, name, terms))
                choices.append(_ChoiceRun(planned, stream, self._tokeniser, prepared.stops))
            for choice in choices:
                await choice.stream.admitted(self._settings.admission_seconds)
            deltas: asyncio.Queue[Delta] = asyncio.Queue(DELTAS_WAITING)
            async with task_group() as group:
                for choice in choices:
                    group.create_task(choice.work(deltas))
                yield CompletionRun(prepared, choices, deltas)

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
        if drawn * prompts > self._settings.max_choices:
            raise BadRequest(
                f"{name}={drawn} of {prompts} prompts makes {drawn * prompts} choices; one request may ask for "
                f"{self._settings.max_choices}",
                param=name,
            )
        return drawn

    def _stops(self, stop: str | list[str] | None) -> tuple[str, ...]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if len(stops) > self._settings.stop_strings:
            raise BadRequest(f"stop holds {len(stops)} strings; at most {self._settings.stop_strings}", param="stop")
        for text in stops:
            if not 0 < len(text) <= self._settings.stop_characters:
                raise BadRequest(
                    f"a stop string must have 1 to {self._settings.stop_characters} characters, not {len(text)}",
                    param="stop",
                )
        return stops

    async def _prompt(self, text: bytes | TokenArray, *, echo: bool) -> Prompt:
        if isinstance(text, bytes):
            tokens = await tokens_of(self._tokeniser, text, self._settings.piece_bytes)
            return Prompt(tokens, text.decode() if echo else "")
        return Prompt(text, await self._tokeniser.text(text) if echo else "")


def _at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise BadRequest(f"{name}={value} is over this service's limit of {limit}", param=name)


def _of_choice(sampling: SamplingSpec, number: int) -> SamplingSpec:
    """The sampling of choice `number` of a prompt: the first draws what it would draw alone, the others differ."""
    if sampling.seed is None or number == 0:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed} {number}".encode()).digest()
    return msgspec.structs.replace(sampling, seed=int.from_bytes(digest[:8], "little", signed=True))


def _reason(event: Generated) -> FinishReason | None:
    if event.finish_reason is None:
        return None
    return "length" if event.finish_reason == "length" else "stop"

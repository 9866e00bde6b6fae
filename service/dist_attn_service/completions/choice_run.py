"""One choice of a completion in the engine: its prompt in, perhaps from a stored state on, and its text out."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dist_attn.errors import TokenError
from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import Generated, Progress, Rows, SamplingSpec, TokenLogprobs
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.completions.prefixes import PrefixCache, PromptPrefix
from dist_attn_service.engine.completion_stream import CompletionStream, CompletionWork
from dist_attn_service.text.choice_text import ChoiceText, PromptText, ScoredToken
from dist_attn_service.text.tokenising import TokeniserPort

__all__ = ["ChoiceRun", "Delta", "FinishReason", "PlannedChoice", "Prompt"]

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
    place: int = 0  # of its prompt


@dataclass(frozen=True)
class Delta:
    """More text of one choice; `finish_reason` stands on its last one only."""

    index: int
    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    processed: int | None = None  # where it says nothing but how far the prompt has been read


Opened = Callable[[CompletionWork], CompletionStream]


class ChoiceRun:
    """One choice in the engine. It may begin with a stored state that some `cached` tokens of the prompt are in."""

    def __init__(
        self,
        planned: PlannedChoice,
        prefix: PromptPrefix,
        opened: Opened,
        tokeniser: TokeniserPort,
        stops: tuple[str, ...],
    ) -> None:
        self._planned = planned
        self._prefix = prefix
        self._opened = opened
        self._tokeniser = tokeniser
        self._prompt: PromptText | None = None
        self._text = ChoiceText(
            tokeniser, stops, offset=len(planned.prompt.echo), min_tokens=planned.sampling.min_tokens
        )
        self.cached = prefix.begin.position if prefix.begin else 0
        self.stream = opened(CompletionWork(planned.sampling, prefix.begin, prefix.states_at))
        self.drawn = 0

    def close(self) -> None:
        """Leave the engine."""
        self.stream.close()

    async def begin(self, prefixes: PrefixCache, admission_seconds: float) -> None:
        """Wait until the engine has the choice, and the state to begin with; without that it reads the whole prompt.

        Raises: ServiceError when the engine does not take it.
        """
        await self.stream.admitted(admission_seconds)
        if self._prefix.begin is None or await prefixes.restore(self._prefix, self.stream):
            return
        self.stream.close()
        self.cached = 0
        self.stream = self._opened(CompletionWork(self._planned.sampling))
        await self.stream.admitted(admission_seconds)

    async def work(self, deltas: "asyncio.Queue[Delta]") -> None:
        """Send the prompt as credit allows, then hand on what is drawn.

        Raises: ServiceError when the engine fails.
        """
        prompt, scores = self._planned.prompt, self._planned.sampling.prompt_logprobs
        scored: tuple[ScoredToken, ...] = ()
        if scores is not None:
            self._prompt = await PromptText.of(self._tokeniser, prompt.tokens)
            scored = (self._prompt.first(),)
        if prompt.echo or scored:
            await deltas.put(Delta(self._planned.index, prompt.echo, scored))
        self.stream.stands_for(self._planned.prompt.tokens[: self.cached])
        await self.stream.send(self._planned.prompt.tokens[self.cached :], final=True)
        reason = None
        while reason is None:
            event = await self.stream.next()
            delta = await self._scores(event) if isinstance(event, Rows) else self._take(event)
            reason = delta.finish_reason
            await deltas.put(delta)
        self.stream.close()

    async def _scores(self, rows: Rows) -> Delta:
        """How likely the next tokens of the prompt are; its text was handed on before."""
        count = self._planned.sampling.prompt_logprobs
        if self._prompt is None or count is None:
            raise EngineFailure("the engine answered a completion with rows")
        return Delta(self._planned.index, "", tuple(await self._prompt.scored(rows, count)))

    def _take(self, event: object) -> Delta:
        if isinstance(event, Progress):
            return Delta(self._planned.index, "", processed=event.processed)
        if not isinstance(event, Generated):
            raise EngineFailure(f"the engine answered a completion with {event!r:.200}")
        told: Sequence[TokenLogprobs | None] = event.logprobs or [None] * len(event.tokens)
        end = told[-1] if len(told) == len(event.tokens) + 1 and event.finish_reason == "stop" else None
        told = told if end is None else told[:-1]
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
        if reason is not None and self._prompt is not None and not self._prompt.whole:
            raise EngineFailure("the engine ended a completion before it had sent the scores of its prompt")
        if reason is not None and not self._text.stopped:
            if end is not None and self._tokeniser.end_token is not None:
                self._text.end(self._tokeniser.end_token, end)
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        return Delta(self._planned.index, text, tuple(self._text.take_scored()), reason)


def _reason(event: Generated) -> FinishReason | None:
    if event.finish_reason is None:
        return None
    return "length" if event.finish_reason == "length" else "stop"

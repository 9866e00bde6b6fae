"""One choice of a completion in the engine: its prompt in, perhaps from a stored state on, and its text out."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import BeginState, Generated, Keep, Progress, Rows, SamplingSpec
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.completions.prefixes import PrefixCache, PromptPrefix
from dist_attn_service.engine.run import EngineRun
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.text.choice_text import ChoiceText, FinishReason, PromptText, ScoredToken, finish_reason
from dist_attn_service.text.tokenising import TokeniserPort

__all__ = ["ChoiceRun", "Delta", "PlannedChoice", "Prompt"]


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


Opened = Callable[[BeginState | None, Keep], EngineStream]


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
        self.stream = opened(prefix.begin, Keep(at=prefix.states_at))

    @property
    def drawn(self) -> int:
        """Tokens of its text so far; those behind a stop string are none."""
        return self._text.drawn

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
        self.stream = self._opened(None, Keep())
        await self.stream.admitted(admission_seconds)

    async def work(self, deltas: "asyncio.Queue[Delta]") -> None:
        """Send the prompt as credit allows, and hand on what is drawn.

        Raises: ServiceError when the engine fails.
        """
        index, prompt, scores = self._planned.index, self._planned.prompt, self._planned.sampling.prompt_logprobs
        scored: tuple[ScoredToken, ...] = ()
        if scores is not None:
            self._prompt = await PromptText.of(self._tokeniser, prompt.tokens)
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
            await deltas.put(delta)
            if ended:
                self.stream.close()

        async def on_progress(event: Progress) -> None:
            await deltas.put(Delta(index, "", processed=event.processed))

        self.stream.stands_for(prompt.tokens[: self.cached])
        await EngineRun(self.stream, on_rows, on_tokens, on_progress).work(prompt.tokens[self.cached :])
        if not ended:
            raise EngineFailure("the engine ended a completion before its last token")

    async def _scores(self, rows: Rows) -> Delta:
        """How likely the next tokens of the prompt are; its text was handed on before."""
        count = self._planned.sampling.prompt_logprobs
        if self._prompt is None or count is None:
            raise EngineFailure("the engine answered a completion with rows")
        return Delta(self._planned.index, "", tuple(await self._prompt.scored(rows, count)))

    def _take(self, event: Generated) -> Delta:
        """The text of newly drawn tokens; behind them there may stand how likely the end token was."""
        told, end = event.logprobs or [], None
        if event.finish_reason == "stop" and len(told) == len(event.tokens) + 1:
            *told, end = told
            event = msgspec.structs.replace(event, logprobs=told)
        text = self._text.take(event, asked=self._planned.sampling.logprobs is not None)
        reason = finish_reason(event)
        if reason is not None and self._prompt is not None and not self._prompt.whole:
            raise EngineFailure("the engine ended a completion before it had sent the scores of its prompt")
        if reason is not None and not self._text.stopped:
            if end is not None and self._tokeniser.end_token is not None:
                self._text.end(self._tokeniser.end_token, end)
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        return Delta(self._planned.index, text, tuple(self._text.take_scored()), reason)

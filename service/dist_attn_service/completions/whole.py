"""A completion whose choices are gathered whole, for who does not stream it."""

from collections.abc import Callable
from math import inf
from statistics import fmean

from dist_attn_api.types import Choice, Completion, CompletionUsage
from dist_attn_service.completions.prepared import PlannedChoice, PreparedCompletion
from dist_attn_service.completions.run import CompletionService, Delta
from dist_attn_service.text.choice_text import FinishReason, ScoredToken, choice_logprobs

__all__ = ["Gathered", "gather", "whole_completion"]


async def gather(
    service: CompletionService,
    prepared: PreparedCompletion,
    name: str,
    *,
    counted: Callable[[CompletionUsage], None],
    drawn: Callable[[CompletionUsage], None] = lambda _: None,
) -> tuple[list["Gathered"], CompletionUsage]:
    """Draw a completion to its end: the choices that are answered, and its tokens. `counted` is told what was read and
    drawn, however it ends; `drawn` on the way.

    `name` is the request's in the log. Raises: ServiceError when the engine does not take it, or fails.
    """
    choices = [Gathered(prepared.logprobs, planned) for planned in prepared.choices]
    async with service.open(prepared, name) as run:
        try:
            while not run.finished:
                delta = await run.next()
                choices[delta.index].add(delta)
                drawn(run.usage)
        finally:
            counted(run.usage)
    return _best(prepared, choices), run.usage


def whole_completion(
    prepared: PreparedCompletion, model: str, choices: list["Gathered"], usage: CompletionUsage
) -> Completion:
    """The answer in OpenAI's form."""
    return Completion(
        id=prepared.id,
        created=prepared.created,
        model=model,
        choices=[choice.whole(index) for index, choice in enumerate(choices)],
        usage=usage,
    )


class Gathered:
    """What has come of one choice."""

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
        """All of its text."""
        return "".join(delta.text for delta in self._deltas)

    @property
    def scored(self) -> list[ScoredToken]:
        """Its tokens, where log-probabilities were asked for."""
        return [token for delta in self._deltas for token in delta.scored]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""
        return self._deltas[-1].finish_reason

    def whole(self, index: int) -> Choice:
        """As a choice of a completion."""
        logprobs = choice_logprobs(self.scored, self._logprobs)
        return Choice(index=index, text=self.text, logprobs=logprobs, finish_reason=self.finish_reason)


def _best(prepared: PreparedCompletion, choices: list[Gathered]) -> list[Gathered]:
    """Of each prompt's choices the wanted number; where more were drawn, the likeliest first."""
    drawn = len(choices) // len(prepared.prompts)
    if drawn == prepared.answered:
        return choices
    groups = [choices[at : at + drawn] for at in range(0, len(choices), drawn)]
    return [
        choice
        for group in groups
        for choice in sorted(group, key=lambda choice: choice.score, reverse=True)[: prepared.answered]
    ]

"""The text of one choice: drawn tokens in, certain text out up to a stop string, and the scores of its tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dist_attn.errors import TokenError
from dist_attn.text.base import TokenArray
from dist_attn.wire.floats import shortest_float32
from dist_attn.wire.messages import Generated, Rows, TokenLogprobs
from dist_attn_api.types import ChoiceLogprobs
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.text.tokenising import ThreadTokeniser

FinishReason = Literal["stop", "length"]
LOWEST = -9999.0  # JSON has no minus infinity; OpenAI sends this in its place


class StopScanner:
    """A filter that lets text through up to the first stop string, wherever the pieces are cut.

    Of several stop strings the one that is complete first counts, and of those the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain; empty from the stop on."""
        if self.stopped:
            return ""
        self._held += text
        complete = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if complete:
            self.stopped = True
            _, start = min(complete)
            certain, self._held = self._held[:start], ""
            return certain
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        rest, self._held = self._held, ""
        return rest


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True)
class ScoredToken:
    """A token as text, its log-probability, those of the likeliest, and where in the choice's text it begins.

    The first token of a prompt has no log-probability.
    """

    text: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


def choice_logprobs(scored: Sequence[ScoredToken], asked: int | None) -> ChoiceLogprobs | None:
    """Log-probabilities in OpenAI's form, where they were asked for."""
    if asked is None:
        return None
    return ChoiceLogprobs(
        tokens=[token.text for token in scored],
        token_logprobs=[token.logprob for token in scored],
        top_logprobs=[token.top for token in scored] if asked else None,
        text_offset=[token.offset for token in scored],
    )


def finish_reason(event: Generated) -> FinishReason | None:
    """The reason why drawing has ended; None while it goes on."""
    if event.finish_reason is None:
        return None
    return "length" if event.finish_reason == "length" else "stop"


class PromptText:
    """The tokens of a prompt as texts, to be answered with their scores. Memory: all of them."""

    def __init__(self, tokeniser: ThreadTokeniser, texts: list[str], offsets: list[int]) -> None:
        self._tokeniser = tokeniser
        self._texts = texts
        self._offsets = offsets
        self._told = 1  # tokens; the first has no scores

    @property
    def whole(self) -> bool:
        """Return whether the scores of all tokens have come."""
        return self._told == len(self._texts)

    @staticmethod
    async def of(tokeniser: ThreadTokeniser, tokens: TokenArray) -> "PromptText":
        """The texts of these tokens."""
        return PromptText(tokeniser, await tokeniser.texts(tokens), await tokeniser.offsets(tokens))

    def first(self) -> ScoredToken:
        """The first token, which has no score, as nothing stands before it."""
        return ScoredToken(self._texts[0], None, None, 0)

    async def scored(self, rows: Rows, count: int) -> list[ScoredToken]:
        """The tokens that these scores are about, each with the `count` likeliest tokens in its place.

        Raises: EngineFailure for rows that are no scores of this prompt, or not of numbers.
        """
        total, width, first = len(rows.starts), 1 + 2 * count, rows.first_row + 1
        if len(rows.vectors) != 4 * width * total or first != self._told or first + total > len(self._texts):
            raise EngineFailure(f"the engine sent {total} scores from token {first} of a prompt of {len(self._texts)}")
        values_NW = np.frombuffer(rows.vectors, dtype="<f4").reshape(total, width)
        if np.isnan(values_NW).any():
            raise EngineFailure(f"the engine computed a log-probability from token {first} on that is no number")
        likely = await self._tokeniser.texts(values_NW[:, 1 : 1 + count].astype(np.int32).ravel())
        self._told += total
        scores = shortest_float32(np.maximum(values_NW, np.float32(LOWEST))).tolist()
        scored = []
        for row, values in enumerate(scores):
            place = first + row
            top = _top(likely[row * count : (row + 1) * count], values[1 + count :], self._texts[place], values[0])
            scored.append(ScoredToken(self._texts[place], values[0], top, self._offsets[place]))
        return scored


class ChoiceText:
    """The text of drawn tokens, without characters that are not whole or may begin a stop string: these are held back.

    Stop strings are looked for after the first `min_tokens` tokens. `offset` is where the text begins, in characters.
    A `lead` that it begins with is left out.
    """

    def __init__(
        self, tokeniser: ThreadTokeniser, stops: Sequence[str], *, offset: int = 0, min_tokens: int = 0, lead: str = ""
    ) -> None:
        self._tokeniser = tokeniser
        self._decoder = tokeniser.decoder()
        self._scanner = StopScanner(stops)
        self._decoded = offset
        self._certain = offset
        self._finished = False
        self._unstoppable = min_tokens  # so many of the next tokens cannot end the text
        self._lead = lead
        self._scored: deque[ScoredToken] = deque()
        self.drawn = 0
        """The number of tokens that are in the text."""

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has been met, after which no text follows."""
        return self._scanner.stopped

    def take(self, event: Generated, *, asked: bool) -> str:
        """The text that is certain with newly drawn tokens, up to a stop string. `asked`: for log-probabilities.

        Raises: EngineFailure for other log-probabilities than the tokens', and for tokens that the tokeniser does not
            have.
        """
        all_logprobs: Sequence[TokenLogprobs | None] = event.logprobs or [None] * len(event.tokens)
        if len(all_logprobs) != len(event.tokens) or (asked and event.tokens and not event.logprobs):
            raise EngineFailure(
                f"the engine sent {len(all_logprobs)} log-probabilities with {len(event.tokens)} tokens"
            )
        text = ""
        for token, logprobs in zip(event.tokens, all_logprobs, strict=True):
            self.drawn += 1
            try:
                text += self.push(token, logprobs)
            except TokenError as error:
                raise EngineFailure(f"the engine drew a token that the tokeniser does not have: {error}") from None
            if self.stopped:
                break
        return text

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> str:
        """The text that is certain once `token` is drawn.

        Raises: TokenError for a token that the tokeniser does not have.
        """
        text = self._decoder.push(token)
        if logprobs is not None:
            self._scored.append(self._score(token, logprobs))
        self._decoded += len(text)
        if self._unstoppable:
            self._unstoppable -= 1
            return self._let_through(text)
        return self._let_through(self._scanner.push(text))

    def end(self, token: int, logprobs: TokenLogprobs) -> None:
        """Add the score of the end token, which was drawn, after those of the other tokens."""
        self._scored.append(self._score(token, logprobs))

    def finish(self) -> str:
        """The text that was held back, now that no token follows."""
        text = self._scanner.push(self._decoder.finish())
        if not self.stopped:
            text += self._scanner.finish()
            self._finished = True
        return self._let_through(text)

    def take_scored(self) -> list[ScoredToken]:
        """The tokens of the text so far that were not taken yet."""
        taken = []
        while self._scored and (self._finished or self._scored[0].offset < self._certain):
            taken.append(self._scored.popleft())
        return taken

    def _let_through(self, text: str) -> str:
        self._certain += len(text)
        if text and self._lead:
            text, self._lead = text.removeprefix(self._lead), ""
        return text

    def _score(self, token: int, logprobs: TokenLogprobs) -> ScoredToken:
        text, own = self._tokeniser.token_text(token), max(logprobs.drawn, LOWEST)
        likely = [self._tokeniser.token_text(other) for other in logprobs.top_tokens]
        top = _top(likely, [max(value, LOWEST) for value in logprobs.top_logprobs], text, own)
        return ScoredToken(text, own, top, self._decoded)


def _top(texts: Sequence[str], values: Sequence[float], text: str, own: float) -> dict[str, float]:
    """The log-probabilities of the likeliest tokens by their texts, and after them that of the token itself."""
    top: dict[str, float] = {}
    for other, value in zip(texts, values, strict=True):
        top.setdefault(other, value)
    if texts:
        top.setdefault(text, own)
    return top

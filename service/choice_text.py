"""The text of one choice: drawn tokens in, certain text out, and how likely its tokens were."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dist_attn.wire.messages import TokenLogprobs
from service.schemas import ChoiceLogprobs
from service.stopping import StopScanner
from service.tokenising import TokeniserPort

__all__ = ["ChoiceText", "ScoredToken", "told_logprobs"]

LOWEST = -9999.0  # JSON has no minus infinity; OpenAI sends this in its place


@dataclass(frozen=True)
class ScoredToken:
    """A drawn token as text, its log-probability, those of the likeliest, and where in the choice's text it begins."""

    text: str
    logprob: float
    top: dict[str, float]
    offset: int


def told_logprobs(scored: Sequence[ScoredToken], asked: int | None) -> ChoiceLogprobs | None:
    """Log-probabilities in OpenAI's form, where they were asked for."""
    if asked is None:
        return None
    return ChoiceLogprobs(
        tokens=[token.text for token in scored],
        token_logprobs=[token.logprob for token in scored],
        top_logprobs=[token.top for token in scored] if asked else None,
        text_offset=[token.offset for token in scored],
    )


class ChoiceText:
    """Characters that tokens share and what may begin a stop string are held back; so are the tokens they come from."""

    def __init__(self, tokeniser: TokeniserPort, stops: Sequence[str], *, offset: int = 0) -> None:
        self._tokeniser = tokeniser
        self._decoder = tokeniser.decoder()
        self._scanner = StopScanner(stops)
        self._decoded = offset
        self._certain = offset
        self._finished = False
        self._scored: deque[ScoredToken] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been met: nothing follows."""
        return self._scanner.stopped

    def push(self, token: int, told: TokenLogprobs | None = None) -> str:
        """The text that is certain once `token` is drawn.

        Raises: TokenError for a token that the tokeniser does not have.
        """
        text = self._decoder.push(token)
        if told is not None:
            self._scored.append(self._score(token, told))
        self._decoded += len(text)
        return self._let_through(self._scanner.push(text))

    def finish(self) -> str:
        """What was held back, now that no token follows."""
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
        return text

    def _score(self, token: int, told: TokenLogprobs) -> ScoredToken:
        text = self._tokeniser.token_text(token)
        top: dict[str, float] = {}
        for other, value in zip(told.top_tokens, told.top_logprobs, strict=True):
            top.setdefault(self._tokeniser.token_text(other), max(value, LOWEST))
        own = max(told.drawn, LOWEST)
        if told.top_tokens:
            top.setdefault(text, own)
        return ScoredToken(text, own, top, self._decoded)

"""Texts that a model draws, whole or in pieces while they are drawn; a stream that breaks off goes on where it was."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, final

import msgspec

from dist_attn_api.types import Choice, CompletionUsage, GenerationSummary, PromptProgress, TextEvent
from dist_attn_client.errors import BrokenOff, NotOurAnswer, error_of_words
from dist_attn_client.plan import Call, Event, EventDecoder, Finished, Plan, told

Priority = Literal["high", "normal", "low"]


class Drawing(TypedDict, total=False):
    """The options of drawing tokens; docs/reference/service.md says what each does, and which values it takes."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | list[str]
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]


class Sampling(Drawing, total=False):
    """The options of completions: those of drawing, and more."""

    model: str
    n: int
    best_of: int
    echo: bool
    min_tokens: int
    ignore_eos: bool
    priority: Priority


def drawing_body(options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The JSON of a request. It always has a seed: sent again, it draws the same text again."""
    body = told({**options, **more})
    body.setdefault("seed", secrets.randbits(63))
    return body


@dataclass(frozen=True)
class DrawnEnd:
    """The result of a streamed text; `session` has the session's position after it, None for a completion."""

    usage: CompletionUsage
    model: str
    session: GenerationSummary | None = None


@final
class TextPlan(Plan[Choice, DrawnEnd]):
    """Pieces of text, each once, through lost connections.

    The request that is sent again draws the same text again, by its seed, or is told again what was drawn under its
    key. The text that was handed out before is compared with what comes, and left out.
    """

    decoder = EventDecoder

    def __init__(self, call: Call, on_progress: Callable[[PromptProgress], None] | None = None) -> None:
        self._call, self._on_progress = call, on_progress
        self._had: dict[int, str] = {}  # what was handed out, by choice
        self._due: dict[int, str] = {}  # the part of it that has yet to come again
        self._ended: set[int] = set()  # choices whose last piece was handed out
        self._usage: CompletionUsage | None = None
        self._session: GenerationSummary | None = None
        self._model = ""

    def call(self) -> Call:
        """The request, the same each time."""
        return self._call

    def begin(self, headers: Mapping[str, str]) -> None:
        """Check that events come, and expect all that was handed out to come once more."""
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise NotOurAnswer(f"{self._call.what}: events were asked for, and {headers.get('content-type')!r} came")
        self._due = dict(self._had)

    def take(self, part: bytes | Event) -> Iterator[Choice | Finished[DrawnEnd]]:
        """Yield pieces of text, and at the end their result. Raises: Refused, BrokenOff when another text comes."""
        assert isinstance(part, Event)
        if part.data == b"[DONE]":
            if self._usage is None:
                raise BrokenOff(f"{self._call.what}: the stream ended without its usage")
            yield Finished(DrawnEnd(self._usage, self._model, self._session))
            return
        try:
            event = msgspec.json.decode(part.data, type=TextEvent)
        except msgspec.DecodeError as error:
            raise NotOurAnswer(f"{self._call.what}: an event cannot be read: {error}") from None
        if "error" in event:
            raise error_of_words(msgspec.json.decode(part.data, type=dict), what=self._call.what)
        self._model = event.get("model", self._model)
        self._usage, self._session = event.get("usage", self._usage), event.get("session", self._session)
        if (progress := event.get("prompt_progress")) is not None and self._on_progress is not None:
            self._on_progress(progress)
        for choice in event.get("choices", []):
            if (new := self._new(choice)) is not None:
                yield new

    def _new(self, choice: Choice) -> Choice | None:
        """The part of a piece that was not handed out before; None where there is none."""
        due, text, last = self._due.get(choice.index, ""), choice.text, choice.finish_reason is not None
        again = min(len(due), len(text))
        if due[:again] != text[:again] or (last and due[again:]):
            raise NotOurAnswer(
                f"{self._call.what}: after a lost connection the text was drawn again and came out otherwise, so the "
                "pieces that were handed out do not go on; ask for all of it again"
            )
        self._due[choice.index] = due[again:]
        rest = text[again:]
        if not rest and (not last or choice.index in self._ended):
            return None
        if last:
            self._ended.add(choice.index)
        self._had[choice.index] = self._had.get(choice.index, "") + rest
        return replace(choice, text=rest, logprobs=None if again else choice.logprobs)

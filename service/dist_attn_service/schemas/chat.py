"""The JSON of chat completions."""

from typing import Annotated, Literal

from pydantic import Field

from dist_attn_service.schemas.base import Input, Output
from dist_attn_service.schemas.completions import CompletionUsage, PromptProgress
from dist_attn_service.schemas.drawing import AnswerOptions
from dist_attn_service.schemas.neutral_fields import NeutralChat, NeutralMessage

__all__ = [
    "AssistantMessage",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "ChatProgressChunk",
    "ChatRequest",
    "ChatToken",
    "ChatUsageChunk",
    "LikelyToken",
    "TextPart",
]

FinishReason = Literal["stop", "length"]


class TextPart(Input):
    """A part of a message's content; texts are the only ones that a language model reads."""

    type: Literal["text"]
    text: str


class ChatMessage(NeutralMessage, Input):
    """Something that somebody said; parts are joined by line ends."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None


class ChatRequest(NeutralChat, AnswerOptions, Input):
    """OpenAI's chat completion request, with what completions take besides."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class LikelyToken(Output):
    """A token's text, its natural log-probability, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(LikelyToken):
    """A drawn token, and the likeliest ones where it was drawn."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Output):
    """The drawn tokens."""

    content: list[ChatToken]
    refusal: None = None


class AssistantMessage(Output):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Output):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatChunkChoice(Output):
    """More of one answer: `role` first, then pieces of `content`, then nothing but the finish reason."""

    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class _ChunkHead(Output):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str


class ChatChunk(_ChunkHead):
    """One event of a streamed chat completion."""

    choices: list[ChatChunkChoice]


class ChatProgressChunk(_ChunkHead):
    """An event before the first text, when progress was asked for."""

    choices: list[ChatChunkChoice] = Field(default=[], max_length=0)
    prompt_progress: PromptProgress


class ChatUsageChunk(_ChunkHead):
    """The last event, when usage was asked for; any other, when it was asked for in each."""

    choices: list[ChatChunkChoice] = Field(default=[])
    usage: CompletionUsage


class ChatCompletion(Output):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage

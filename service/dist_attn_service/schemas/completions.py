"""The JSON of completions and chats, and the options of how tokens are drawn, which generations of sessions share."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from dist_attn.wire.messages import SamplingSpec
from dist_attn_api.types import Answer, CompletionUsage, FinishReason
from dist_attn_service.schemas.base import Input, ModelName, optional
from dist_attn_service.schemas.neutral_fields import (
    UNUSED,
    EmptyList,
    NeutralChat,
    NeutralCompletion,
    NeutralMessage,
    NeutralStream,
    No,
    One,
    Yes,
    only,
)

SEED_BOUND = 1 << 63
SAID_OTHERWISE = {"max_tokens", "top_k", "logit_bias", "logprobs", "prompt_logprobs", "prompt_tokens", "grammar"}
SAID_AS_THEY_ARE = {*SamplingSpec.__struct_fields__} - SAID_OTHERWISE
"""The options that have the name and the value of a field of SamplingSpec."""

Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = dict[str, Annotated[float, Field(ge=-100, le=100)]]
_FORMS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": {"type": "string"},
    "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    "grammar": {"type": "string"},
}
_OUTPUTS = {
    "type": "object",
    "properties": _FORMS,
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 1,
}
Outputs = Annotated[
    dict[Literal["json", "regex", "choice", "grammar"], Any],
    Field(min_length=1, max_length=1),
    WithJsonSchema(_OUTPUTS),
]


class HowSoon(BaseModel):
    """The priority of a request, and the time for which its answer is of use; they override the headers."""

    priority: Literal["high", "normal", "low"] | None = optional(
        "how urgent it is, default normal; high asks for an admin key where there are any; over `x-request-priority`"
    )
    deadline_seconds: Annotated[float, Field(gt=0, le=2_592_000)] | None = optional(
        "seconds after which the answer is of no use and the work is dropped; over `x-request-deadline`"
    )


class ResponseFormat(Input):
    """OpenAI's form of an answer: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = optional(
        "with the type of this name: its `schema` is followed, whatever `name` and `strict` are"
    )


class DrawingOptions(HowSoon):
    """The options of each request that draws tokens; each kind adds `max_tokens` and `logprobs` with its own bounds."""

    model: ModelName = None
    temperature: Annotated[float, Field(ge=0)] | None = optional(
        "0 takes the likeliest token; default 1, or what a downloaded folder says"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = optional(
        "draw from the likeliest tokens that have this probability together"
    )
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = optional(
        "draw from so many of the likeliest tokens; 0 or -1: from all; vLLM's"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = optional(
        "of the tokens that `top_k` leaves, draw from those whose probability at this temperature is at least so many "
        "times that of the likeliest; `top_p` is then applied to these; vLLM's"
    )
    seed: Annotated[int, Field(ge=-SEED_BOUND, lt=SEED_BOUND)] | None = optional(
        "of 64 bits: the same request draws the same text; choice 0 draws what it draws alone"
    )
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = optional(
        "texts that end what is drawn, up to `limits.stop_strings` of up to `limits.stop_characters` characters; "
        "default of chats: those of the model folder; an empty list: none"
    )
    presence_penalty: Penalty | None = optional(
        "subtracted from the logit of each token that was drawn before; those of the prompt do not count"
    )
    frequency_penalty: Penalty | None = optional("likewise, once for each time it was drawn")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = optional(
        "of tokens that were drawn or stand in the prompt, not in what a session has read: logits above 0 are divided "
        "by it, others multiplied, as transformers does"
    )
    logit_bias: Biases | None = optional(
        "by token id, -100 to 100, at most 1,024: added to its logit; -100 as good as rules it out, the end token too"
    )
    response_format: ResponseFormat | None = optional("what answers are held to, by llguidance; a fault of it is a 400")
    structured_outputs: Outputs | None = optional(
        "one of `json` (a schema), `regex`, `choice` (a list of texts), `grammar` (Lark or GBNF); vLLM's"
    )
    stream: bool | None = optional("answer as server-sent events")
    user: str | None = UNUSED

    def spec(
        self, max_tokens: int, logit_bias: dict[int, float], logprobs: int | None, defaults: Mapping[str, float | int]
    ) -> SamplingSpec:
        """The sampling for the engine: a null option has the model's default, and -1 switches `top_k` off like 0."""
        options: dict[str, Any] = {name: getattr(self, name, None) for name in SAID_AS_THEY_ARE}
        options["top_k"] = None if self.top_k is None else max(0, self.top_k)
        said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        return SamplingSpec(max_tokens, logit_bias=logit_bias, logprobs=logprobs, **{**defaults, **said})


class StreamOptions(NeutralStream, Input):
    """Options of a streamed answer."""

    include_usage: bool | None = optional("a last event with the usage")
    continuous_usage_stats: bool | None = optional("the usage so far in every event; vLLM's")


class AnswerOptions(DrawingOptions):
    """Further options of completions and chats; those whose description begins with `only` are taken at one value."""

    min_tokens: Annotated[int, Field(ge=0)] | None = optional(
        "up to `max_tokens`: before so many tokens no end token is drawn and stop strings are not looked for; vLLM's"
    )
    ignore_eos: bool | None = optional("end tokens do not end the text and count as tokens, without text; vLLM's")
    n: Annotated[int, Field(ge=1)] | None = optional(
        "answers for each prompt, each with a seed of its own; up to `limits.max_choices` over all prompts"
    )
    stream_options: StreamOptions | None = optional("with `stream` alone")
    return_progress: bool | None = optional("with `stream`: events that say how far the prompt is read; ours")
    length_penalty: One | None = only("1: there is no beam search")
    use_beam_search: No | None = only("false: there is no beam search")
    early_stopping: No | None = only("false: there is no beam search")
    stop_token_ids: EmptyList | None = only("an empty list: use stop for what ends a text")
    bad_words: EmptyList | None = only("an empty list: use logit_bias to rule tokens out")
    include_stop_str_in_output: No | None = only("false: a text ends before its stop string")
    skip_special_tokens: Yes | None = only("true: special tokens have no text")
    spaces_between_special_tokens: Yes | None = only("true: special tokens have no text")

    def shared(self) -> dict[str, Any]:
        """These options by name, for a request of the other kind."""
        return {name: getattr(self, name) for name in AnswerOptions.model_fields}


# ---- /v1/completions ---------------------------------------------------------------------------


def _texts(words: str, least: int) -> Any:
    """Texts of which one among others has at least so many characters."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    texts = {"type": "array", "items": {"type": "string", "minLength": least}, "minItems": 1}
    some = [{"type": "string", "minLength": 1}, texts, ids, {"type": "array", "items": ids, "minItems": 1}]
    told = f"a text, a list of texts, a list of token ids, or a list of such lists; {words}"
    return WithJsonSchema({"description": told, "anyOf": some})


Texts = Annotated[Any, _texts("none may be empty", 1)]
Inputs = Annotated[Any, _texts("a text without tokens has a vector of zeros where there are others", 0)]


class CompletionRequest(NeutralCompletion, AnswerOptions, Input):
    """OpenAI's completion request; `priority`, `deadline_seconds` and `return_progress` are our extensions, `top_k`,
    `min_tokens` and `ignore_eos` are vLLM's.
    """

    prompt: Texts
    max_tokens: Annotated[int, Field(ge=0)] | None = optional(
        "1 to `limits.max_tokens`, default 16; with `echo` 0 too, which draws nothing"
    )
    logprobs: Annotated[int, Field(ge=0)] | None = optional(
        "up to `limits.max_logprobs`: log-probabilities of the drawn tokens and of so many likeliest, the model's own, "
        "before biases, penalties, temperature and filters"
    )
    echo: bool | None = optional("the prompt before the text; with `logprobs` those of its tokens too")
    best_of: Annotated[int, Field(ge=1)] | None = optional(
        "from `n` to `limits.max_choices` over all prompts: so many are drawn, and the `n` with the highest mean "
        "log-probability per token are answered, the best first; all count in `usage`; more than `n` not with `stream`"
    )


# ---- /v1/chat/completions ----------------------------------------------------------------------


class TextPart(Input):
    """A part of a message's content; texts are the only ones that a language model reads."""

    type: Literal["text"]
    text: str


_CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["function"],
}


def _call(value: dict[str, Any]) -> dict[str, Any]:
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call needs a function with its name and arguments")
    return value


Call = Annotated[dict[str, Any], AfterValidator(_call), WithJsonSchema(_CALL_SCHEMA)]
_SAYS_SOMETHING: dict[str, Any] = {
    "anyOf": [
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
        {"properties": {"tool_calls": {"type": "array", "minItems": 1}}, "required": ["tool_calls"]},
    ]
}


class ChatMessage(NeutralMessage, Input):
    """A message of a chat; parts are joined by line ends. A tool's answer says which call it answers."""

    model_config = ConfigDict(json_schema_extra=_SAYS_SOMETHING)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = optional("needed without `tool_calls`")
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content; only one with tool_calls may have none")
        return self


class ChatRequest(NeutralChat, AnswerOptions, Input):
    """OpenAI's chat completion request, with the further options of completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True, description="at least one")]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = optional(
        "told to the template, and refused where it does not look at them; calls of other forms than those of Hermes, "
        "Qwen, Llama 3 and Mistral stand in `content` as drawn"
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = optional(
        '`required`, or {"type": "function", "function": {"name": …}}: nothing but a call is drawn'
    )
    parallel_tool_calls: bool | None = optional(
        "true: of `required` up to 32 calls, else one; false: of `auto` the first alone"
    )
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = optional(
        "told to the template, and refused where it does not look at them"
    )
    chat_template_kwargs: dict[str, Any] | None = optional(
        "further values for the template, such as `enable_thinking`; none that has a field of its own"
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = optional("up to `limits.max_tokens`, default 1,024")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = optional("another name of `max_tokens`")
    logprobs: bool | None = optional("each drawn token with its log-probability and bytes")
    top_logprobs: Annotated[int, Field(ge=0)] | None = optional(
        "with `logprobs`: so many likeliest tokens, up to `limits.max_logprobs`"
    )


class LikelyToken(Answer):
    """A token's text, its natural log-probability, and its bytes."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatToken(LikelyToken):
    """A drawn token, and the likeliest ones where it was drawn."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Answer):
    """The drawn tokens with their log-probabilities."""

    content: list[ChatToken]
    refusal: None = None


class AssistantMessage(Answer):
    """The message that the model has drawn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ToolFunction(Answer):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call that the model wants made."""

    id: str
    type: Literal["function"] = "function"
    function: ToolFunction


class CallingMessage(Answer):
    """A message that calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall]


class ChatChoice(Answer):
    """One answer to a chat."""

    index: int
    message: AssistantMessage | CallingMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | Literal["tool_calls"]


class ChatChunkChoice(Answer):
    """More of one answer: `role` first, then pieces of `content` and calls, then nothing but the finish reason."""

    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | Literal["tool_calls"] | None = None


class ChatCompletion(Answer):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage

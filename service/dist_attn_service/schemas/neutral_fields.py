"""Fields of OpenAI's and other servers' requests that are taken at the values that change nothing here.

Clients and benchmarks send many of them always. Where a field has a description, any other value would ask for what
this service does not do: it is refused, in these words. A field without one may have any value of its type.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["NeutralChat", "NeutralCompletion", "NeutralEmbedding", "NeutralMessage", "NeutralStream", "words_on"]


def _bool(value: Any) -> Any:
    if not isinstance(value, bool):  # to a Literal 0 and 1 are as good
        raise ValueError("true or false was needed")
    return value


EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]
TextAlone = Annotated[list[Literal["text"]], Field(min_length=1, fail_fast=True)]
Yes = Annotated[Literal[True], BeforeValidator(_bool)]
No = Annotated[Literal[False], BeforeValidator(_bool)]
One = Annotated[float, Field(ge=1, le=1)]
Zero = Annotated[float, Field(ge=0, le=0)]


def _only(words: str) -> Any:
    return Field(default=None, description=f"only {words}")


class PlainText(BaseModel):
    """Any text, in no particular form."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["text"]


class NeutralEmbedding(BaseModel):
    """Of embeddings, and of everything else that reads a text."""

    safety_identifier: str | None = None
    truncate_prompt_tokens: None = _only("null: a text is read whole, or as far as the model reads")
    add_special_tokens: Yes | None = _only("true: the tokens around a text are the model's own")


class NeutralDrawing(BaseModel):
    """Of completions and chats."""

    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    add_special_tokens: bool | None = None  # a text never becomes a special token, so there are none to add
    store: No | None = _only("false: answers are not kept; a job keeps its result")
    service_tier: Literal["auto", "default"] | None = _only('"auto" or "default"; use priority for how soon it is done')
    response_format: PlainText | None = _only('{"type": "text"}: what is drawn is not held to a form')
    repetition_penalty: One | None = _only(
        "1: penalties are subtracted; use presence_penalty or frequency_penalty, which the prompt does not count for"
    )
    min_p: Zero | None = _only("0: use top_p or top_k to draw from the likeliest tokens")
    length_penalty: One | None = _only("1: there is no beam search")
    use_beam_search: No | None = _only("false: there is no beam search")
    early_stopping: No | None = _only("false: there is no beam search")
    stop_token_ids: EmptyList | None = _only("an empty list: use stop for what ends a text")
    bad_words: EmptyList | None = _only("an empty list: use logit_bias to rule tokens out")
    include_stop_str_in_output: No | None = _only("false: a text ends before its stop string")
    skip_special_tokens: Yes | None = _only("true: special tokens have no text")
    spaces_between_special_tokens: Yes | None = _only("true: special tokens have no text")
    truncate_prompt_tokens: None = _only("null: a prompt is read whole")


class NeutralCompletion(NeutralDrawing):
    """Of completions."""

    suffix: Literal[""] | None = _only("an empty text: nothing is written between two texts")


class NeutralChat(NeutralDrawing):
    """Of chats."""

    parallel_tool_calls: bool | None = None
    tools: EmptyList | None = _only("an empty list: no tools are called")
    tool_choice: Literal["none", "auto"] | None = _only('"none" or "auto": no tools are called')
    functions: EmptyList | None = _only("an empty list: no functions are called")
    function_call: Literal["none", "auto"] | None = _only('"none" or "auto": no functions are called')
    modalities: TextAlone | None = _only('["text"]: answers are texts')
    audio: None = _only("null: answers are texts")
    prediction: None = _only("null: every token is drawn")
    reasoning_effort: None = _only("null: what the template makes of the messages is all that the model is told")
    verbosity: None = _only("null: what the template makes of the messages is all that the model is told")
    web_search_options: None = _only("null: nothing is searched")
    chat_template_kwargs: EmptyObject | None = _only("an empty object: the template is told the messages alone")
    add_generation_prompt: Yes | None = _only("true: the assistant speaks next")
    continue_final_message: No | None = _only("false: the assistant speaks next")


class NeutralMessage(BaseModel):
    """Of a message, as it stands in an answer that is sent back."""

    refusal: None = _only("null: refusals are texts like others")
    tool_calls: EmptyList | None = _only("an empty list: no tools are called")
    function_call: None = _only("null: no functions are called")
    audio: None = _only("null: messages are texts")
    annotations: EmptyList | None = _only("an empty list: messages are texts")


class NeutralStream(BaseModel):
    """Of `stream_options`."""

    include_obfuscation: No | None = _only("false: events are as long as their text")


_OUTSIDE = (NeutralEmbedding, NeutralDrawing, NeutralCompletion, NeutralChat)
_INSIDE = (NeutralMessage, NeutralStream)


def words_on(kind: type[BaseModel], path: tuple[str | int, ...]) -> str | None:
    """Why the field at this place of a request takes only some values; None of fields that do what they say."""
    outer, inner = path[0], [part for part in path[1:] if isinstance(part, str)]
    places: list[tuple[type[BaseModel], str | int]] = [(base, outer) for base in kind.__mro__[1:] if base in _OUTSIDE]
    places += [(base, name) for base in _INSIDE for name in inner]
    found = (base.model_fields[name] for base, name in places if name in base.model_fields)
    return next((field.description for field in found), None)

"""Fields of OpenAI's and other servers' requests that are taken at the values that change nothing here.

Clients and benchmarks send many of them always. Where a field's words begin with "only", any other value would ask for
what this service does not do: it is refused, in these words. The other fields may have any value of their type.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from dist_attn_service.schemas.base import optional


def _bool(value: Any) -> Any:
    if not isinstance(value, bool):  # a Literal would take 0 and 1 too
        raise ValueError("true or false was needed")
    return value


EmptyList = Annotated[list[Any], Field(max_length=0)]
TextAlone = Annotated[list[Literal["text"]], Field(min_length=1, fail_fast=True)]
Yes = Annotated[Literal[True], BeforeValidator(_bool)]
No = Annotated[Literal[False], BeforeValidator(_bool)]
One = Annotated[float, Field(ge=1, le=1)]
Zero = Annotated[float, Field(ge=0, le=0)]


def only(words: str) -> Any:
    """A field that takes only the value that `words` begin with; any other is refused with these words."""
    return optional(f"only {words}")


UNUSED = optional("not looked at: nothing of the answer depends on it")


class NeutralEmbedding(BaseModel):
    """The neutral fields of embeddings."""

    safety_identifier: str | None = UNUSED
    truncate_prompt_tokens: None = only("null: a text is read whole, or as far as the model reads")
    add_special_tokens: Yes | None = only("true: the tokens around a text are the model's own")


class NeutralRerank(BaseModel):
    """The neutral fields of rerankings, by Cohere, Jina and text-embeddings-inference: a text is read as far as the
    model reads, in one piece, and a cosine has one form.
    """

    max_chunks_per_doc: int | None = UNUSED
    truncation: bool | None = UNUSED
    truncate: bool | None = UNUSED
    truncation_direction: Literal["right", "Right"] | None = only('"right": a text is read from its beginning')
    raw_scores: bool | None = UNUSED
    rank_fields: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = only(
        '["text"]: documents are put in order by their text; put other fields into it'
    )


class NeutralDrawing(BaseModel):
    """The neutral fields of completions and chats."""

    metadata: dict[str, Any] | None = UNUSED
    safety_identifier: str | None = UNUSED
    prompt_cache_key: str | None = UNUSED
    add_special_tokens: bool | None = optional(
        "false leaves out the tokens that a downloaded model's files put around every text; of chats not looked at"
    )
    store: No | None = only("false: answers are not kept; a job keeps its result")
    service_tier: Literal["auto", "default"] | None = only('"auto" or "default"; use priority for how soon it is done')
    truncate_prompt_tokens: None = only("null: a prompt is read whole")


class NeutralCompletion(NeutralDrawing):
    """The neutral fields of completions alone."""

    suffix: Literal[""] | None = only("an empty text: nothing is written between two texts")


class NeutralChat(NeutralDrawing):
    """The neutral fields of chats alone."""

    functions: EmptyList | None = only("an empty list: no functions are called")
    function_call: Literal["none", "auto"] | None = only('"none" or "auto": no functions are called')
    modalities: TextAlone | None = only('["text"]: answers are texts')
    audio: None = only("null: answers are texts")
    prediction: None = only("null: every token is drawn")
    reasoning_effort: None = only("null: what the template makes of the messages is all that the model is told")
    verbosity: None = only("null: what the template makes of the messages is all that the model is told")
    web_search_options: None = only("null: nothing is searched")
    add_generation_prompt: Yes | None = only("true: the assistant speaks next")
    continue_final_message: No | None = only("false: the assistant speaks next")


class NeutralMessage(BaseModel):
    """The neutral fields of a message, as an earlier answer that is sent back has them."""

    refusal: None = only("null: refusals are texts like others")
    function_call: None = only("null: no functions are called")
    audio: None = only("null: messages are texts")
    annotations: EmptyList | None = only("an empty list: messages are texts")


class NeutralStream(BaseModel):
    """The neutral fields of `stream_options`."""

    include_obfuscation: No | None = only("false: events are as long as their text")


_INSIDE = (NeutralMessage, NeutralStream)


def words_on(kind: type[BaseModel], path: tuple[str | int, ...]) -> str | None:
    """The words on why the field at this place of a request takes only some values; None for all other fields."""
    outer, inner = path[0], [part for part in path[1:] if isinstance(part, str)]
    places: list[tuple[type[BaseModel], str | int]] = [(kind, outer)]
    places += [(base, name) for base in _INSIDE for name in inner]
    words = (base.model_fields[name].description or "" for base, name in places if name in base.model_fields)
    return next((text for text in words if text.startswith("only ")), None)

"""The JSON of OpenAI's /v1/responses, and the chat that a request of it asks for."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from dist_attn_service.schemas.base import Input, optional
from dist_attn_service.schemas.completions import DrawingOptions
from dist_attn_service.schemas.neutral_fields import UNUSED, EmptyList, NeutralDrawing, NeutralStream, No, Zero, only


class NeutralStreamOptions(NeutralStream, Input):
    """Options of a streamed response, of which none changes it."""


class ResponsePart(Input):
    """A part of a message or of a tool's answer; of others the text is looked for."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text", "text"]
    text: str


PartsOrText = str | Annotated[list[ResponsePart], Field(fail_fast=True)]
_NEEDED = {"message": ["content"], "function_call": ["call_id", "name"], "function_call_output": ["call_id", "output"]}
_BY_TYPE: dict[str, Any] = {
    "anyOf": [
        {"properties": {"type": {"const": kind}}, "required": names if kind == "message" else ["type", *names]}
        for kind, names in _NEEDED.items()
    ]
}


class ResponseItem(Input):
    """A message, a call of a tool or its answer, also as an earlier answer has it; other members are ignored."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_BY_TYPE)

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = Field(default="user", description="of a message")
    content: PartsOrText = Field(default="", description="of a message")
    call_id: str = Field(default="", description="of a call and its answer")
    name: str = Field(default="", description="of a call")
    arguments: str = Field(default="{}", description="of a call")
    output: PartsOrText = Field(default="", description="of an answer")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name in _NEEDED[self.type]:
            if name not in self.model_fields_set:
                raise ValueError(f"a {self.type} needs {name}")
        return self


class FunctionTool(Input):
    """A function that the model may call; other kinds of tools would have to run here."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = UNUSED


class ResponseText(Input):
    """The form of the answer's text."""

    format: dict[str, Any] | None = optional(
        'OpenAI\'s: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": …, "schema": …}'
    )
    verbosity: None = only("null: what the template makes of the messages is all that the model is told")


class ResponseRequest(NeutralDrawing, DrawingOptions, Input):
    """OpenAI's request for a response: texts and calls of functions; what would need an earlier answer is refused."""

    input: str | Annotated[list[ResponseItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = optional("a system message before the input")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = optional("up to `limits.max_tokens`, default 1,024")
    text: ResponseText | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = optional("as of chats")
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = optional("as of chats")
    parallel_tool_calls: bool | None = optional("as of chats")
    stream_options: NeutralStreamOptions | None = None
    previous_response_id: None = only("null: answers are not kept; send the whole conversation as input")
    conversation: None = only("null: conversations are not kept; send the whole one as input")
    prompt: None = only("null: there are no prompts of other places; send input")
    background: No | None = only("false: answers are not kept; a job of /v1/jobs goes on without its client")
    include: EmptyList | None = only("an empty list: nothing more is known")
    reasoning: None = only("null: what the template makes of the messages is all that the model is told")
    max_tool_calls: None = only("null: nothing is called here")
    top_logprobs: Zero | None = only("0: /v1/chat/completions tells log-probabilities")
    truncation: Literal["disabled", "auto"] | None = UNUSED

    def chat(self) -> dict[str, Any]:
        """The body of the same request to /v1/chat/completions."""
        shared = {name: getattr(self, name) for name in DrawingOptions.model_fields}
        form, choice = dict((self.text and self.text.format) or {"type": "text"}), self.tool_choice
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        body = {"messages": self._messages(), "response_format": form, "tools": tools, "tool_choice": choice}
        limits = {"max_tokens": self.max_output_tokens, "parallel_tool_calls": self.parallel_tool_calls}
        return {name: value for name, value in {**shared, **body, **limits}.items() if value is not None}

    def _messages(self) -> list[dict[str, Any]]:
        """Instructions and input as messages; calls stand in the assistant's message before them."""
        made: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in [ResponseItem(content=self.input)] if isinstance(self.input, str) else self.input:
            if item.type == "function_call":
                if not made or made[-1]["role"] != "assistant":
                    made.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                made[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                made.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                made.append({"role": item.role, "content": _text(item.content)})
        return made

    def echoed(self) -> dict[str, Any]:
        """The members that an answer repeats."""
        names = ("instructions", "max_output_tokens", "temperature", "top_p")
        return {
            **{name: getattr(self, name) for name in names},
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "tools": [{**vars(tool)} for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "metadata": self.metadata or {},
        }


def _text(parts: PartsOrText) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)

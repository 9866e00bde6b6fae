"""The form that a request holds its answers to, as a grammar for the engine."""

import json
from typing import Any

from dist_attn.errors import GrammarError
from dist_attn.text.grammars import GrammarKind
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.completions.bounded_grammar import bounded_grammar
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.schemas.completions import DrawingOptions, ResponseFormat

_KINDS: dict[str, tuple[GrammarKind, str]] = {
    "json": ("json_schema", "a JSON schema: an object"),
    "regex": ("regex", "a text"),
    "choice": ("choice", "a list of texts"),
    "grammar": ("grammar", "a text"),
}


async def grammar_of(context: ServiceContext, request: DrawingOptions) -> str:
    """Write the grammar that the answers follow; empty where they are held to no form.

    Raises: BadRequest naming the parameter and the fault of a schema or a grammar.
    """
    form, asked = request.response_format, request.structured_outputs
    param, name, given = "response_format", "json", None if form is None else _schema(form)
    if asked is not None:
        if given is not None:
            raise BadRequest("response_format gives a form too; send one of the two", param="structured_outputs")
        ((name, given),) = asked.items()
        param = f"structured_outputs.{name}"
    elif given is None:
        return ""
    if getattr(request, "ignore_eos", None):
        raise BadRequest("an answer of a form ends where the form does; leave it out", param="ignore_eos")
    kind, words = _KINDS[name]
    content = _content(name, given)
    if content is None:
        raise BadRequest(f"{param} needs {words}", param=param)
    try:
        return await context.beside(bounded_grammar, kind, content)
    except GrammarError as error:
        raise BadRequest(f"no answer can be held to this {param}: {error}", param=param) from None


def _schema(form: ResponseFormat) -> Any:
    """The schema of a JSON answer; None for any text. Raises: BadRequest where it is not told."""
    if form.type == "text":
        return None
    schema = {"type": "object"} if form.type == "json_object" else (form.json_schema or {}).get("schema")
    if schema is None:
        raise BadRequest("json_schema needs a schema: an object {name, schema}", param="response_format.json_schema")
    return schema


def _content(name: str, given: Any) -> str | dict[str, Any] | None:
    """The content that a grammar is written of; None where what is given is of another type."""
    if name == "choice":
        of_texts = isinstance(given, list) and given and all(isinstance(text, str) for text in given)
        return json.dumps(given) if of_texts else None
    if name == "json" and isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict if name == "json" else str) else None

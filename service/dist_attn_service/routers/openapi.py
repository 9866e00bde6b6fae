"""The OpenAPI document, with the bodies, queries and answers that the routes read and write themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dist_attn_service.base.errors import PROBLEM_JSON

Json = dict[str, Any]
Parameters = list[Json]

REFERENCE = "#/components/schemas/{model}"
JSON, TEXT, BYTES, FORM = "application/json", "text/plain", "application/octet-stream", "multipart/form-data"
EVENTS = "text/event-stream"
ANY_TEXT: Json = {"schema": {"type": "string"}}
ANY_BYTES: Json = {"schema": {"type": "string", "format": "binary"}}
_BODIES: dict[str, type[BaseModel]] = {}  # the bodies that routes have been described with


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class Problem(BaseModel):
    """A problem document of RFC 9457, which also holds OpenAI's error object."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    error: ErrorObject


class ServerSentEvent(BaseModel):
    """One event of a stream; `data` is JSON, or `[DONE]` at the end. Only those of a job have a type and an id."""

    data: str
    event: str = "message"
    id: str | None = None


PROBLEM_RESPONSE = {
    "description": "A problem document (RFC 9457) that also holds OpenAI's error object.",
    "content": {PROBLEM_JSON: {"schema": {"$ref": REFERENCE.format(model="Problem")}}},
}


def described(
    kind: type[BaseModel] | None = None,
    *,
    content: Mapping[str, Json] | None = None,
    required: bool = True,
    parameters: Parameters | None = None,
    answers: Json | None = None,
) -> Json:
    """The `openapi_extra` of a route: its body is JSON of this `kind`, or has one of the other types in `content`."""
    extra: Json = {"parameters": parameters} if parameters else {}
    bodies: Json = {}
    if kind is not None:
        _BODIES[kind.__name__] = kind
        bodies[JSON] = {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}}
    bodies.update(content or {})
    if bodies:
        extra["requestBody"] = {"required": required, "content": bodies}
    return extra | ({"responses": answers} if answers else {})


def form(*required: str, **fields: Json) -> dict[str, Json]:
    """A body that is a form with these fields and no others."""
    return {
        FORM: {
            "schema": {
                "type": "object",
                "required": list(required),
                "properties": fields,
                "additionalProperties": False,
            }
        }
    }


def header(name: str, schema: Json, *, required: bool = False) -> Json:
    """A header of a request, as one of its parameters."""
    return {"name": name, "in": "header", "required": required, "schema": schema}


def query_parameters(kind: type[BaseModel], leave_out: Sequence[str] = ()) -> Parameters:
    """The fields of a model as parameters of a query, in which null is said by leaving one out."""

    def parameter(name: str, schema: Json) -> Json:
        values = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
        words = {key: schema[key] for key in ("description",) if key in schema}
        return {"name": name, "in": "query", "required": False, "schema": {**values[0], **words} if values else schema}

    fields = kind.model_json_schema()["properties"]
    return [parameter(name, schema) for name, schema in fields.items() if name not in leave_out]


def answered(description: str, *media_types: str, status: int = 200) -> Json:
    """The description of an answer that is not JSON of a fixed shape."""
    return {str(status): {"description": description, "content": dict.fromkeys(media_types, ANY_TEXT)}}


def events(description: str) -> Json:
    """The description of an answer that is, or may be, a stream of events."""
    return {
        "200": {
            "description": description,
            "content": {EVENTS: {"schema": {"$ref": REFERENCE.format(model="ServerSentEvent")}}},
        }
    }


def openapi_document(app: FastAPI) -> Json:
    """The whole document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        kinds: tuple[type[BaseModel], ...] = (*_BODIES.values(), Problem, ServerSentEvent)
        _, made = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(made["$defs"])
        app.openapi_schema = document
    return app.openapi_schema

"""The parts of every schema of a request."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST = 1 << 53  # every number that clients send is exact in JavaScript and in JSON
MAX_WINDOW = 1_000_000


class Input(BaseModel):
    """The base of JSON requests: unknown keys are refused, nothing is converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def optional(words: str) -> Any:
    """A field that may be left out, and what it does in words for `/docs` and docs/reference/service.md."""
    return Field(default=None, description=words)


class Query(BaseModel):
    """The base of queries: texts, from which numbers are made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def digits(value: Any) -> Any:
    """Refuse a number of a query that is not digits alone: 5.0, +5 or 5_0, which Python would read as well."""
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]+", value):
        raise ValueError("a whole number was needed, in digits alone")
    return value


MODEL_WORDS = "the served model's id; any other is a 404"
ModelName = Annotated[str | None, Field(description=MODEL_WORDS)]
Cut = Literal["sentence", "paragraph", "chapter"]
Granularity = Literal["token", "window", "document", Cut]
Pooling = Literal["mean", "last"]
RowFormatName = Literal["ndjson", "arrow", "npy"]
Position = Annotated[int, Field(ge=0, le=MOST)]
QueryNumber = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(digits)]
PageSize = Annotated[int, Field(ge=1, le=100), BeforeValidator(digits)]
LastId = Annotated[str, Field(max_length=100)]


class ListOptions(Query):
    """The page of a list: at most `limit` entries, those after the id `after`."""

    limit: PageSize = 20
    after: LastId = ""

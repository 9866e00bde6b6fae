"""The requests about stored things: sessions, and files and uploads in OpenAI's shapes."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dist_attn_service.schemas.base import Input, ModelName, Position, Query, QueryNumber, digits, optional
from dist_attn_service.schemas.completions import DrawingOptions, HowSoon

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
STANDS = "where the session must stand; elsewhere nothing is done, and the answer is a 409"


class _NewSession(Input):
    name: Annotated[str, Field(max_length=256)] | None = optional("at most 256 characters")
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = optional(
        "at most 16 texts of 512 characters under keys of 64"
    )
    ttl_seconds: Annotated[float, Field(ge=1)] | None = optional(
        "it ends when it was not written to for so long; up to `store.longest_ttl_s`, default `store.session_ttl_s`"
    )


class CreateSession(_NewSession):
    """A new session: its name, its metadata, and the seconds that it lives without being written to."""

    model: ModelName = None


class ForkSession(_NewSession):
    """A new fork: `position` must be that of a checkpoint; without one it begins at the session's position."""

    position: Position | None = optional("one of the checkpoints")


class StateOptions(Query):
    """The choice of a state: that of the checkpoint at `position`, or the newest."""

    position: QueryNumber | None = optional("one of the checkpoints; left out: the newest state")


class AppendOptions(Query):
    """The position that the caller expects of the session, in the query of any append or in a JSON body."""

    expected_position: QueryNumber | None = optional(STANDS)


class AppendRequest(HowSoon, Input):
    """The JSON form of an append: a text, or a file that was uploaded; a long text is better sent as the body."""

    input: str | None = optional("the text")
    file_id: str | None = Field(default=None, description="a file in place of `input`")
    expected_position: Position | None = optional(STANDS)


class GenerateRequest(DrawingOptions, Input):
    """The options by which the model goes on with the text of a session; they are those of completions."""

    expected_position: Position | None = optional(STANDS)
    max_tokens: Annotated[int, Field(ge=1)] | None = optional("up to `limits.max_tokens`, default 16")
    logprobs: Annotated[int, Field(ge=0)] | None = optional("as of completions")


# ---- files and uploads -------------------------------------------------------------------------


FilePurpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
MOST_LISTED = 10_000
HOUR, MONTH = 3600, 2_592_000


def _printable(text: str) -> str:
    """Refuse a name that lists and headers cannot show: it may not end a line, and must have a form in UTF-8."""
    if any(
        ord(character) < 32 or 0x7F <= ord(character) < 0xA0 or 0xD800 <= ord(character) < 0xE000 for character in text
    ):
        raise ValueError("it holds control characters, or half of a surrogate pair")
    return text


Printable = Annotated[str, Field(max_length=1024), AfterValidator(_printable)]


class ExpiresAfter(Input):
    """The expiry of a file: so many seconds after it is made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR, le=MONTH)]


class UploadRequest(Input):
    """An upload of so many bytes, which then come by PATCH."""

    bytes: Annotated[int, Field(ge=0)]
    filename: Printable
    mime_type: Printable
    purpose: FilePurpose
    expires_after: ExpiresAfter | None = None
    session_id: Annotated[str, Field(max_length=100)] | None = Field(
        default=None, description="a session that is fed with it while it arrives"
    )
    expected_position: Position | None = Field(default=None, description="where that session must stand")


class FileListOptions(Query):
    """The choice of files to list, in the query."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED), BeforeValidator(digits)] = MOST_LISTED
    order: Literal["asc", "desc"] = "desc"
    purpose: FilePurpose | None = None

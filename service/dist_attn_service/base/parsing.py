"""The checks that make values of bytes and headers; each refusal says what is wrong and what is right."""

import gc
import hashlib
import math
import reprlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.specs import CALLER_LENGTH, PRIORITIES, Terms
from dist_attn_service.base.errors import NO_RETRY, BadRequest, Code, ServiceError
from dist_attn_service.base.settings import Settings
from dist_attn_service.schemas.completions import CompletionRequest, HowSoon
from dist_attn_service.schemas.neutral_fields import words_on
from dist_attn_service.schemas.stored import GenerateRequest

M = TypeVar("M", bound=BaseModel)
DEFAULT_MAX_TOKENS = 16
MOST_KEYS = 1024  # of an object in a request
PRIORITY_HEADER, DEADLINE_HEADER = "x-request-priority", "x-request-deadline"
NORMAL = PRIORITIES.index("normal")
MOST_SECONDS = 30 * 86_400.0


def parse_json(data: bytes, kind: type[M]) -> M:
    """A JSON body as a value of `kind`.

    Raises: BadRequest naming the offset or the key that is wrong.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"byte {error.start} of the JSON body is not valid UTF-8 ({error.reason})", code=Code.INVALID_UTF8
        ) from None
    try:
        value = _read(text)  # NaN too: it is refused below, by the name of its option
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", code=Code.INVALID_JSON) from None
    _bounded(value, kind)
    return validated(kind, value)


def _read(text: str) -> Any:
    """Decode JSON without the search for garbage, which would take most of the time of many lists and find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return from_json(text)
    finally:
        if enabled:
            gc.enable()


def _bounded(value: Any, kind: type[BaseModel]) -> None:
    """Refuse what would make a long list of errors: validation blocks the event loop until it has found them all.

    Raises: BadRequest for an object with more keys than any option has.
    """
    if not isinstance(value, dict):
        return
    if len(value) > MOST_KEYS:
        raise _unknown(next(name for name in value if name not in kind.model_fields), kind)
    for name, inner in value.items():
        if keys := _many_keys(inner):
            raise BadRequest(f"{name} holds {keys} keys; at most {MOST_KEYS} are read", param=name)


def _many_keys(value: Any) -> int:
    """The number of keys of an object in a value that has more than MOST_KEYS of them; 0 where none has."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            if len(one) > MOST_KEYS:
                return len(one)
            pending += [inner for inner in one.values() if isinstance(inner, dict | list)]
        elif isinstance(one, list):  # lists in lists are of tokens, and may be millions
            pending += [inner for inner in one if isinstance(inner, dict)]
    return 0


def parse_query(items: list[tuple[str, str]], kind: type[M]) -> M:
    """The options in a query string.

    Raises: BadRequest naming the option.
    """
    values: dict[str, str] = {}
    for name, value in items:
        if name in values:
            shown = name[:200]
            raise BadRequest(f"{shown} is given more than once; give it once", param=shown)
        values[name] = value
    return validated(kind, values)


def validated(kind: type[M], values: Any) -> M:
    """Validate values as one of `kind`.

    Raises: BadRequest naming what is wrong.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise refuse(error.errors(include_url=False, include_context=False), kind) from None


def refuse(errors: list[ErrorDetails], kind: type[BaseModel]) -> BadRequest:
    """Make the first validation error the answer."""
    first = errors[0]
    if isinstance(first["input"], dict):  # also tried as a text, where a field takes both
        first = next((error for error in errors if error["type"] == "missing"), first)
    elif isinstance(first["input"], list):  # likewise: what is wrong in it says more
        first = next((error for error in errors if len(error["loc"]) > len(first["loc"])), first)
    place, inner = _place(kind, first["loc"])
    name = place.partition("[")[0] or None
    match first["type"]:
        case "model_type" | "model_attributes_type" if not first["loc"]:
            return BadRequest("the body must be a JSON object", code=Code.INVALID_JSON)
        case "extra_forbidden":
            return _unknown(str(first["loc"][-1]), inner, place)
        case "missing":
            return BadRequest(f"{place} is missing; it is required", code=Code.MISSING_PARAMETER, param=name)
        case "too_short" if words_on(kind, first["loc"]) is None:  # where lists have a bound it is 1
            return BadRequest(f"{place} is empty; send one at least", code=Code.EMPTY_INPUT, param=name)
        case _:
            value = reprlib.repr(first["input"])
            shown = value if len(value) <= 80 else f"{value[:77]}..."
            if (words := words_on(kind, first["loc"])) is not None:
                message = f"{place}={shown} is not offered: {words}"
                return BadRequest(message, code=Code.UNSUPPORTED_PARAMETER, param=name)
            object_needed = first["type"] in ("model_type", "model_attributes_type")
            or_text = "a text or " if any(error["type"] == "string_type" for error in errors) else ""
            why = f"{or_text}a JSON object was needed" if object_needed else first["msg"].removeprefix("Value error, ")
            return BadRequest(f"{place} cannot be {shown}: {why}", param=name)


def _place(kind: type[BaseModel], path: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """The place of a value in a request, as `documents[0].text`, and the kind of the innermost object around it."""
    place = ""
    for part in path:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part in kind.model_fields:  # else it says which of several types was tried
            place = f"{place}.{part}" if place else part
            if words_on(kind, (part,)) is not None:
                break  # these words are about all that the field holds
            kind = next(_objects(kind.model_fields[part].annotation), kind)
    return place, kind


def _objects(annotation: Any) -> Iterator[type[BaseModel]]:
    """The kinds of objects that a field may hold, itself or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _objects(part)


def _unknown(name: str, kind: type[BaseModel], place: str = "") -> BadRequest:
    """The refusal of a key that the object at this place cannot have."""
    near = get_close_matches(name[:200], kind.model_fields, n=1, cutoff=0.75)
    meant = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(sorted(field for field in kind.model_fields if words_on(kind, (field,)) is None))
    shown = f"{place}.{name}"[:200] if place else name[:200]
    words = f"unknown parameter {shown!r}; {meant}known are {known}"
    return BadRequest(words, code=Code.UNKNOWN_PARAMETER, param=shown.partition("[")[0])


def parse_texts(value: Any, name: str, vocab_size: int, limit: int, *, empty: bool = False) -> list[bytes | TokenArray]:
    """The texts of a prompt or input: one or a list of at most `limit`, each as UTF-8 bytes or token ids.

    With `empty` a text among others may have no characters.

    Raises: BadRequest when one is empty, of another kind, or holds ids outside the vocabulary.
    """
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > limit:
            raise BadRequest(f"{name} holds {len(value)} texts; one request takes at most {limit}", param=name)
        empty &= len(value) > 1
        return [
            b"" if empty and item == "" else _parse_one(item, f"{name}[{place}]", name, vocab_size)
            for place, item in enumerate(value)
        ]
    return [_parse_one(value, name, name, vocab_size)]


def _parse_one(value: Any, where: str, name: str, vocab_size: int) -> bytes | TokenArray:
    if not isinstance(value, str | list):
        raise BadRequest(f"{where} must be a text or a list of token ids, not {type(value).__name__}", param=name)
    if not value:
        raise BadRequest(
            f"{where} is empty; send at least one character or one token id", code=Code.EMPTY_INPUT, param=name
        )
    return utf8(value, where, name) if isinstance(value, str) else parse_tokens(value, where, name, vocab_size)


def parse_tokens(value: list[Any], where: str, name: str, vocab_size: int) -> TokenArray:
    """Token ids of a vocabulary.

    Raises: BadRequest naming the place of the first that is none.
    """
    # By types and extremes: a list may hold millions, and everybody waits for a loop that looks at each of them.
    if not set(map(type, value)) <= {int} or (value and (min(value) < 0 or max(value) >= vocab_size)):
        place, token = next(
            (place, token) for place, token in enumerate(value) if type(token) is not int or not 0 <= token < vocab_size
        )
        raise BadRequest(
            f"{where}[{place}] is {str(token)[:40]}; token ids are whole numbers from 0 to {vocab_size - 1}", param=name
        )
    return np.array(value, dtype=np.int32)


def _biases(value: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Biases by token id; JSON's keys are texts.

    Raises: BadRequest naming the first key that is no token of the vocabulary.
    """
    biases: dict[int, float] = {}
    for name, bias in (value or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 16 and int(name) < vocab_size):
            raise BadRequest(
                f"logit_bias names {name[:40]!r}; its keys are token ids, whole numbers from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        biases[int(name)] = bias
    return biases


def parse_drawing(
    options: CompletionRequest | GenerateRequest,
    limits: Settings,
    vocab_size: int,
    defaults: Mapping[str, float | int],
) -> tuple[SamplingSpec, tuple[str, ...]]:
    """The sampling of a request, with the model's `defaults` where it says nothing, and the strings that end a text.

    Raises: BadRequest naming the option that is over a limit of this service, or does not fit its model.
    """
    most = DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens
    for name, value, limit in (
        ("max_tokens", most, limits.max_tokens),
        ("logprobs", options.logprobs or 0, limits.max_logprobs),
    ):
        if value > limit:
            raise BadRequest(f"{name}={value} is over this service's limit of {limit}", param=name)
    spec = options.spec(most, _biases(options.logit_bias, vocab_size), options.logprobs, defaults)
    if spec.min_tokens > most:
        raise BadRequest(f"min_tokens={spec.min_tokens} is more than max_tokens={most}", param="min_tokens")
    stops = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
    if len(stops) > limits.stop_strings:
        raise BadRequest(f"stop holds {len(stops)} strings; at most {limits.stop_strings}", param="stop")
    for text in stops:
        if not 0 < len(text) <= limits.stop_characters:
            said = f"a stop string must have 1 to {limits.stop_characters} characters, not {len(text)}"
            raise BadRequest(said, param="stop")
    return spec, stops


def utf8(text: str, where: str, name: str) -> bytes:
    """A text as UTF-8.

    Raises: BadRequest for half of a surrogate pair, which JSON can say and UTF-8 cannot.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{where} holds half of a surrogate pair at character {error.start}; send whole characters",
            code=Code.INVALID_UTF8,
            param=name,
        ) from None


class DeadlineExceeded(ServiceError):
    """The request's own deadline has passed; to send it again as it is would be of no use."""

    default_code = Code.DEADLINE_EXCEEDED
    default_headers = NO_RETRY


@dataclass(frozen=True)
class RequestTerms:
    """The priority and deadline of a request; with `progress` the client is told how far its prompt is read.

    `deadline_at` is in seconds of the monotonic clock, None for none. `holder` is whose share of the engine the request
    takes, as `RequestRecord.holder`.
    """

    priority: int = NORMAL
    deadline_at: float | None = None
    progress: bool = False
    holder: str = ""

    def for_engine(self, tokens: int | None = None) -> Terms:
        """The terms that the engine gets with a part of the request that has so many tokens.

        Raises: DeadlineExceeded when it is too late for that.
        """
        left = None if self.deadline_at is None else self.deadline_at - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the request's deadline passed before the engine could begin with it")
        # The engine shares by caller and need not know who that is.
        digest = hashlib.sha256(self.holder.encode()).hexdigest()[:CALLER_LENGTH] if self.holder else ""
        return Terms(self.priority, left, tokens, self.progress, digest)


def terms_of(
    body: HowSoon | None, headers: Mapping[str, str], *, may_hurry: bool = True, holder: str = ""
) -> RequestTerms:
    """The terms of a request of `holder`, whose body counts before its headers; its deadline counts from now.

    Raises: BadRequest for a class or a number of seconds that there is not, ServiceError (403) for `high` of a caller
        that may not ask for it.
    """
    priority = (body and body.priority) or headers.get(PRIORITY_HEADER, "normal").strip().lower()
    if priority not in PRIORITIES:
        raise BadRequest(f"{PRIORITY_HEADER} is {priority[:40]!r}; send one of {', '.join(PRIORITIES)}")
    if priority == "high" and not may_hurry:
        raise ServiceError(
            "the priority high needs an admin key, and this key is not one; leave the priority out",
            code=Code.ADMIN_KEY_NEEDED,
            param="priority",
        )
    seconds = None if body is None else body.deadline_seconds
    if seconds is None and DEADLINE_HEADER in headers:
        seconds = _seconds(headers[DEADLINE_HEADER])
    deadline_at = None if seconds is None else time.monotonic() + seconds
    progress = bool(getattr(body, "return_progress", None))  # not all bodies can ask for that
    return RequestTerms(PRIORITIES.index(priority), deadline_at, progress, holder)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise BadRequest(
            f"{DEADLINE_HEADER} is {text[:40]!r}; send the seconds from now after which the answer is of no use, up "
            f"to {MOST_SECONDS:g}"
        )
    return seconds

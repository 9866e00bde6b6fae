"""The roots of the error tree, which library, service and client share, and every code that a service answers with.

dist_attn/errors.py draws the whole tree. To add a code, add a line here and a row in docs/reference/service.md: the
service raises it as `ServiceError(…, code=Code.…)`, the engine sends it in `Failed`, and the client raises the
exception of its status (dist_attn_client/errors.py).
"""

from enum import StrEnum
from typing import Self


class DistAttnError(Exception):
    """Anything these packages raise on purpose."""


class InputError(DistAttnError, ValueError):
    """The caller gave something unusable."""


class ClientError(DistAttnError):
    """A call to a service came to something else than success; dist_attn_client/errors.py has its kinds."""


class Code(StrEnum):
    """The closed set of `error.code`, each with its HTTP status; metrics and clients may rely on it."""

    status: int

    def __new__(cls, value: str, status: int) -> Self:
        """A code and its usual HTTP status; an answer may have another one where that says more."""
        code = str.__new__(cls, value)
        code._value_, code.status = value, status
        return code

    @classmethod
    def of(cls, value: object) -> "Code | None":
        """The code with this value; None where this version knows none."""
        return next((code for code in cls if code == value), None)

    # the request
    BAD_HTTP = "bad_http", 400
    INVALID_JSON = "invalid_json", 400
    INVALID_UTF8 = "invalid_utf8", 400
    INVALID_VALUE = "invalid_value", 400
    MISSING_PARAMETER = "missing_parameter", 400
    UNKNOWN_PARAMETER = "unknown_parameter", 400
    UNSUPPORTED_PARAMETER = "unsupported_parameter", 400
    NO_CHAT_TEMPLATE = "no_chat_template", 400
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type", 415
    EMPTY_INPUT = "empty_input", 400
    MODEL_NOT_FOUND = "model_not_found", 404
    NOT_FOUND = "not_found", 404
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    INVALID_API_KEY = "invalid_api_key", 401
    ADMIN_KEY_NEEDED = "admin_key_needed", 403
    HOST_NOT_ALLOWED = "host_not_allowed", 421
    ORIGIN_NOT_ALLOWED = "origin_not_allowed", 403
    BODY_TIMEOUT = "body_timeout", 408
    BODY_TOO_LARGE = "body_too_large", 413
    HEAD_TOO_LARGE = "head_too_large", 431
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded", 413
    # sessions and files
    CONFLICT = "conflict", 409
    SESSION_BUSY = "session_busy", 409
    PRECONDITION_FAILED = "precondition_failed", 412
    PRECONDITION_REQUIRED = "precondition_required", 428
    INSUFFICIENT_QUOTA = "insufficient_quota", 429
    # jobs
    JOB_NOT_DONE = "job_not_done", 409
    INPUT_LOST = "input_lost", 500
    # the engine
    ENGINE_NOT_READY = "engine_not_ready", 503
    ENGINE_UNREACHABLE = "engine_unreachable", 503
    ENGINE_TIMEOUT = "engine_timeout", 504
    ENGINE_FAILED = "engine_failed", 500
    OVERLOADED = "overloaded", 429
    DEADLINE_EXCEEDED = "deadline_exceeded", 504
    # stored states
    INVALID_STATE = "invalid_state", 400
    STATE_MISMATCH = "state_mismatch", 409
    STATE_DAMAGED = "state_damaged", 500
    # this process
    DISK_FULL = "disk_full", 507
    STORAGE_FAILED = "storage_failed", 507
    STOPPING = "stopping", 503
    INTERNAL_ERROR = "internal_error", 500

"""What the store refuses, as answers."""

from collections.abc import Iterator
from contextlib import contextmanager

from dist_attn.errors import (
    BusyError,
    ConflictError,
    InputError,
    PositionError,
    QuotaError,
    StateDamagedError,
    StateMismatchError,
    StorageError,
    UnknownStateError,
    WireError,
)
from dist_attn_service.base.errors import BadRequest, Code, NotFound, ServiceError, retry_after

NO_RETRY = {"x-should-retry": "false"}  # the official client would send a 409 or 429 again by itself


@contextmanager
def store_refusals() -> Iterator[None]:
    """Raises: ServiceError in place of what the store raises in the block."""
    try:
        yield
    except UnknownStateError as error:
        raise NotFound(str(error)) from None
    except PositionError as error:
        facts = {"expected_position": error.expected, "position": error.position}
        if error.start is not None:
            facts["start"] = error.start
        raise _conflict(str(error), facts) from None
    except BusyError as error:
        after = retry_after(error.retry_s)
        raise ServiceError(str(error), code=Code.SESSION_BUSY, headers=after) from None
    except ConflictError as error:
        raise _conflict(str(error), {}) from None
    except QuotaError as error:
        raise ServiceError(str(error), code=Code.INSUFFICIENT_QUOTA, headers=NO_RETRY) from None
    except StateDamagedError as error:
        raise ServiceError(str(error), code=Code.STATE_DAMAGED, headers=NO_RETRY) from None
    except StorageError as error:
        raise ServiceError(str(error), code=Code.STORAGE_FAILED, headers=NO_RETRY) from None
    except StateMismatchError as error:
        raise ServiceError(str(error), code=Code.STATE_MISMATCH, headers=NO_RETRY) from None
    except WireError as error:
        raise BadRequest(str(error), code=Code.INVALID_STATE) from None
    except InputError as error:
        raise BadRequest(str(error)) from None


def _conflict(message: str, facts: dict[str, int]) -> ServiceError:
    return ServiceError(message, code=Code.CONFLICT, headers=NO_RETRY, facts=facts)

"""The error tree of the engine: every failure a user can meet, in one place.

    DistAttnError                     anything raised on purpose by this package
    ├── InputError (ValueError)       the caller gave something unusable: exit code 2, HTTP 4xx
    │   ├── ShapeError                tensors whose shapes or dtypes do not fit together
    │   ├── ConfigError               a configuration value or key that is not accepted
    │   ├── ModelFolderError          a model folder that is missing, incomplete or of another kind
    │   ├── TokenError                bytes or token ids that the tokeniser cannot take
    │   │   └── TokeniserError        a text at which a model's tokenizer.json fails
    │   ├── GrammarError              a form that an answer cannot be held to
    │   ├── StateMismatchError        a stored state that belongs to another model; names both values
    │   ├── UnknownStateError         a session, checkpoint or snapshot that is not there, or not this caller's
    │   └── ConflictError             what was asked for does not go with how a session stands
    │       ├── PositionError         it stands elsewhere than the caller thinks; has both positions
    │       └── BusyError             it is being written to; says how long that may take
    ├── CommError                     an exchange between ranks failed; names the rank and the operation
    │   └── MismatchError             ranks called different operations, shapes, dtypes or layouts
    ├── WireError                     a message between processes that cannot be read or is out of order
    ├── NotFiniteError                a NaN or an infinity, named where `check_finite` asks for it
    ├── EngineError                   the rank group failed while it held work
    ├── StorageError                  a file could not be written, as on a full disk
    │   ├── QuotaError                a caller's share of the store is used up
    │   ├── StateDamagedError         a stored state whose bytes are gone, or are not those that were stored
    │   └── CatalogueDamagedError     a catalogue that is missing beside what it lists, no database, or damaged
    ├── ClientError                   a call to a service ended without success; kinds in dist_attn_client/errors.py
    └── MissingExtraError             an optional dependency is needed; says what to run (`extra_hint`)

A message says what was given, what was needed and what to do about it.
"""

import errno

from dist_attn_api.errors import ClientError, DistAttnError, InputError

__all__ = [
    "NO_ROOM",
    "BusyError",
    "CatalogueDamagedError",
    "ClientError",
    "CommError",
    "ConfigError",
    "ConflictError",
    "DistAttnError",
    "EngineError",
    "GrammarError",
    "InputError",
    "MismatchError",
    "MissingExtraError",
    "ModelFolderError",
    "NotFiniteError",
    "PositionError",
    "QuotaError",
    "ShapeError",
    "StateDamagedError",
    "StateMismatchError",
    "StorageError",
    "TokenError",
    "TokeniserError",
    "UnknownStateError",
    "WireError",
    "extra_hint",
]

# The numbers of an OSError where a disk is full, a quota used up, or a file as large as it may be.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ShapeError(InputError):
    """Tensors whose shapes or dtypes do not fit together."""


class ConfigError(InputError):
    """A configuration value or key that is not accepted."""


class ModelFolderError(InputError):
    """A model folder that is missing, incomplete or of another kind."""


class TokenError(InputError):
    """Bytes or token ids that the tokeniser cannot take."""


class TokeniserError(TokenError):
    """A text at which a model's tokenizer.json fails, and the `tokenizers` library with it."""


class GrammarError(InputError):
    """A form that an answer cannot be held to."""


class StateMismatchError(InputError):
    """A stored state that belongs to another model."""


class UnknownStateError(InputError):
    """A session, checkpoint or snapshot that is not there, or not this caller's."""


class ConflictError(InputError):
    """A request that the session's position or its writer does not allow."""


class PositionError(ConflictError):
    """A session that stands at `position`, not at the `expected` one.

    `start` is where an append began of which a part is kept, the tokens from there to `expected`; None otherwise.
    """

    def __init__(self, message: str, *, expected: int, position: int, start: int | None = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.position = position
        self.start = start


class BusyError(ConflictError):
    """A session that is being written to; in `retry_s` seconds its writer has spoken, ended, or is given up."""

    def __init__(self, message: str, *, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class CommError(DistAttnError):
    """An exchange between ranks failed."""


class MismatchError(CommError):
    """Ranks called different operations, shapes, dtypes or layouts."""


class WireError(DistAttnError):
    """A message between processes that cannot be read or is out of order; `request_id`: what it is about, if known."""

    request_id: str = ""


class NotFiniteError(DistAttnError):
    """A NaN or an infinity went into an operation or came out of it."""


class EngineError(DistAttnError):
    """The rank group failed while it held work."""


class StorageError(DistAttnError):
    """A file could not be written, as on a full disk."""


class QuotaError(StorageError):
    """A caller's share of the store is used up."""


class StateDamagedError(StorageError):
    """A stored state whose bytes are gone, or are not those that were stored."""


class CatalogueDamagedError(StorageError):
    """A catalogue that is missing beside what it lists, is no database, or is damaged."""


class MissingExtraError(DistAttnError):
    """An optional dependency is needed and not installed."""


def extra_hint(extra: str) -> str:
    """Say how to install an extra of pyproject.toml: from a checkout, as no package index has this project."""
    return f"in the checkout, run .venv/bin/pip install -e '.[{extra}]'"

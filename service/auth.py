"""Who may ask for what: bearer keys, known by their hashes and compared in constant time."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from dist_attn.errors import ConfigError
from service.errors import Code, ServiceError
from service.page_files import PAGE_FILES
from service.settings import Settings

__all__ = ["ADMIN_ROUTES", "OPEN_ROUTES", "KeyRing"]

OPEN_ROUTES = frozenset({"/livez", "/readyz", *PAGE_FILES})
"""Exact paths that answer without a key: the health checks, and the files of the page."""
ADMIN_ROUTES = frozenset({"/metrics", "/v1/status"})
"""Routes that ask for an admin key once there is one; until then any key opens them."""
_KEY = r"[\x21-\x7e]{1,512}"
_BEARER = re.compile(f"bearer +({_KEY})", re.IGNORECASE)
_CHALLENGE = {"www-authenticate": 'Bearer realm="dist-attn"'}


@dataclass(frozen=True)
class KeyRing:
    """The SHA-256 digests of the keys that are accepted; an admin key opens everything."""

    users: frozenset[bytes] = frozenset()
    admins: frozenset[bytes] = frozenset()

    @classmethod
    def read(cls, settings: Settings) -> "KeyRing":
        """The keys that the settings name.

        Raises: ConfigError for a file that cannot be read, that holds no key, or one that cannot be sent.
        """
        return cls(
            _digests(settings.api_keys, settings.api_keys_file), _digests(settings.admin_keys, settings.admin_keys_file)
        )

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return not self.users and not self.admins

    def refusal(self, scope: Scope) -> ServiceError | None:
        """Why this request may not pass, or None; notes in the scope's record which key it came with.

        The record's `caller` is the digest of that key: whose files and sessions a request may see.
        """
        if self.open or scope["path"] in OPEN_ROUTES:
            return None
        given = _BEARER.fullmatch(Headers(scope=scope).get("authorization", "").strip())
        if given is None:
            return _unauthorised("this service asks for a key; send the header `Authorization: Bearer YOUR-KEY`")
        digest = hashlib.sha256(given[1].encode()).digest()
        # Both are always looked through to their ends, so that the time tells nothing of what is in them.
        is_user, is_admin = _holds(self.users, digest), _holds(self.admins, digest)
        if not is_user and not is_admin:
            return _unauthorised(
                "the key is not one of this service; check it, or ask who runs the service for another"
            )
        record = scope["state"]["record"]
        record.caller = digest.hex()
        record.note(key=record.caller[:8])
        if scope["path"] in ADMIN_ROUTES and self.admins and not is_admin:
            return ServiceError(
                f"{scope['path']} asks for an admin key; this one is not", code=Code.ADMIN_KEY_NEEDED, status=403
            )
        return None


def _unauthorised(message: str) -> ServiceError:
    return ServiceError(message, code=Code.INVALID_API_KEY, status=401, headers=_CHALLENGE)


def _holds(digests: Iterable[bytes], wanted: bytes) -> bool:
    found = False
    for digest in digests:
        found |= hmac.compare_digest(digest, wanted)
    return found


def _digests(hashes: tuple[str, ...], file: Path | None) -> frozenset[bytes]:
    digests = {bytes.fromhex(text) for text in hashes}
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="ascii").splitlines()]
        except OSError as error:
            raise ConfigError(f"the file of keys {file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"the file of keys {file} holds more than ASCII, which no header can carry") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"the file of keys {file} holds no key; write one per line, or leave the setting out")
        for number, key in enumerate(keys, start=1):
            if not re.fullmatch(_KEY, key):
                raise ConfigError(
                    f"key {number} in {file} holds a space or a control character, or more than 512 characters: no "
                    "client could send it; write one key per line"
                )
        digests |= {hashlib.sha256(key.encode()).digest() for key in keys}
    return frozenset(digests)

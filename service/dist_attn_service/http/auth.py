"""The check of keys: bearer tokens or X-API-Key, known by their hashes and compared in constant time.

Without keys every request is answered, except those that a page of another site sends through a visitor's browser, be
it under a name of that site that points here (DNS rebinding) or under a name of this service.
"""

import hashlib
import hmac
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from dist_attn.settings import KEY, read_keys
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.base.settings import Settings
from dist_attn_service.http.pages import PAGE_FILES

__all__ = ["ADMIN_ROUTES", "OPEN_ROUTES", "KeyRing"]

OPEN_ROUTES = frozenset({"/health", "/livez", "/readyz", *PAGE_FILES})
"""Exact paths that answer without a key: the health checks, and the files of the page."""
ADMIN_ROUTES = frozenset({"/metrics", "/v1/status"})
"""Routes that ask for an admin key once there is one; until then any key opens them."""
_BEARER = re.compile(f"bearer +({KEY})", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][:@/?#]+)(:[0-9]*)?")
_LABEL = re.compile(r"[a-z0-9_-]+")
_CHALLENGE = {"www-authenticate": 'Bearer realm="dist-attn"'}


@dataclass(frozen=True)
class KeyRing:
    """The SHA-256 digests of the keys that are accepted; an admin key opens everything.

    `hosts` are the names, in lower case, under which a service without keys answers.
    """

    users: frozenset[bytes] = frozenset()
    admins: frozenset[bytes] = frozenset()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def read(cls, settings: Settings) -> "KeyRing":
        """The keys that the settings name.

        Raises: ConfigError for a file that cannot be read, that holds no key, or one that cannot be sent.
        """
        hosts = {"localhost", settings.host, socket.gethostname(), *settings.allowed_hosts}
        return cls(
            _digests(settings.api_keys, settings.api_keys_file),
            _digests(settings.admin_keys, settings.admin_keys_file),
            frozenset(name.lower() for name in hosts),
        )

    @property
    def open(self) -> bool:
        """Return whether no key is asked for."""
        return not self.users and not self.admins

    def refusal(self, scope: Scope) -> ServiceError | None:
        """The error for a request that may not pass, or None; notes in the scope's record the key it came with.

        The record's `caller` is the digest of that key, and a request may see the files and sessions of its caller.
        While there are admin keys only they may ask for the priority `high`.
        """
        if scope["path"] in OPEN_ROUTES:
            return None
        headers = Headers(scope=scope)
        if self.open:
            return self._wrong_host(headers.get("host", "")) or _wrong_origin(scope["method"], headers)
        bearer = _BEARER.fullmatch(headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").strip())
        if bearer is None:
            return _unauthorised(
                "this service asks for a key; send it as `Authorization: Bearer YOUR-KEY` or as `X-API-Key: YOUR-KEY`"
            )
        digest = hashlib.sha256(bearer[1].encode()).digest()
        # Both are always searched to their ends, so that the time tells nothing of the keys in them.
        is_user, is_admin = _holds(self.users, digest), _holds(self.admins, digest)
        if not is_user and not is_admin:
            return _unauthorised(
                "the key is not one of this service; check it, or ask who runs the service for another"
            )
        record = scope["state"]["record"]
        record.caller = digest.hex()
        record.may_hurry = is_admin or not self.admins
        record.note(key=record.caller[:8])
        if scope["path"] in ADMIN_ROUTES and self.admins and not is_admin:
            return ServiceError(f"{scope['path']} asks for an admin key; this one is not", code=Code.ADMIN_KEY_NEEDED)
        return None

    def _wrong_host(self, host: str) -> ServiceError | None:
        """Refuse a domain that its owner can point here. An address points to itself, and a name without a dot, as
        those of compose and of a local network, is no domain that anybody can register.
        """
        match = _HOST.fullmatch(host.strip())
        name = match[1].strip("[]").rstrip(".").lower() if match else host
        if not host or name in self.hosts or _is_address(name) or _LABEL.fullmatch(name):
            return None
        return ServiceError(
            f"Host is {host[:80]!r}, and a service that asks for no key answers only under names that it knows: use "
            "its address or localhost, name it in http.allowed_hosts, or set keys",
            code=Code.HOST_NOT_ALLOWED,
        )


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _wrong_origin(method: str, headers: Headers) -> ServiceError | None:
    """Refuse what a page of another site sends through its visitor's browser, but for a link that is followed."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None:  # no browser, or one that does not say so of plain HTTP
        foreign = origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    else:
        foreign = site not in ("same-origin", "none")
    if not foreign or (method == "GET" and headers.get("sec-fetch-mode") == "navigate"):
        return None
    return ServiceError(
        f"a page of another site ({(origin or 'unknown')[:80]}) sent this; while the service asks for no key it takes "
        "requests of its own page and of programs only",
        code=Code.ORIGIN_NOT_ALLOWED,
    )


def _unauthorised(message: str) -> ServiceError:
    return ServiceError(message, code=Code.INVALID_API_KEY, headers=_CHALLENGE)


def _holds(digests: Iterable[bytes], presented: bytes) -> bool:
    known = False
    for digest in digests:
        known |= hmac.compare_digest(digest, presented)
    return known


def _digests(hashes: tuple[str, ...], file: Path | None) -> frozenset[bytes]:
    digests = {bytes.fromhex(text) for text in hashes}
    if file is not None:
        digests |= {hashlib.sha256(key.encode()).digest() for key in read_keys(file)}
    return frozenset(digests)

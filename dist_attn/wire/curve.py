"""The right to speak to the controller over a network: CURVE keys in files, and the list of admitted ones.

    FOLDER/controller.secret   the controller alone          controller.public   whoever connects, who pins it
    FOLDER/api.secret          API processes                 api*.public         those whose owners may send requests
    FOLDER/agent.secret        agents and their ranks        agent*.public       those whose owners may be ranks

A file holds one key in Z85, 40 characters. Keys are used on every tcp:// address once a folder is named; sockets in the
file system (ipc://) are guarded by the permissions of their folder.
"""

import contextlib
import ipaddress
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import zmq
from zmq.utils import z85

from dist_attn.errors import ConfigError

Role = Literal["api", "agent"]
OWNERS = ("controller", "api", "agent")
KEY_CHARACTERS = 40
HOW = "make them with `dist-attn keys FOLDER`"


def is_on_network(address: str) -> bool:
    """Return whether other machines could reach a ZeroMQ address; host names count as reachable, but for localhost."""
    scheme, _, place = address.partition("://")
    host = place.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or host in ("localhost", "lo"):
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def check_exposure(address: str, folder: str, *, insecure: bool) -> None:
    """Let an address on a network pass only with keys, or where the settings say that it may go without.

    Raises: ConfigError saying what to do.
    """
    if is_on_network(address) and not folder and not insecure:
        raise ConfigError(
            f"{address} can be reached over a network, and no keys are set: name their folder by engine.keys_dir "
            f"({HOW}), or set engine.insecure_network where nobody else is on that network"
        )


@dataclass(frozen=True)
class ClientKeys:
    """The keys with which a process connects: its own pair, and the public key of the only controller it speaks to."""

    public: bytes
    secret: bytes = field(repr=False)
    controller: bytes

    @classmethod
    def find(cls, folder: str, role: Role, address: str) -> Self | None:
        """The keys for an address; None where it needs none.

        Raises: ConfigError for a file that is missing, holds no key, or can be read by others.
        """
        if not folder or not address.startswith("tcp://"):
            return None
        secret = _read_secret(Path(folder) / f"{role}.secret")
        return cls(zmq.curve_public(secret), secret, _read_key(Path(folder) / "controller.public"))

    def apply(self, socket: "zmq.Socket[Any]") -> None:
        """Let a socket that is not connected yet use these keys."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.controller)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


@dataclass(frozen=True)
class ServerKeys:
    """The controller's own secret key, and the list on which the clients of a socket must stand."""

    role: Role
    secret: bytes = field(repr=False)

    @classmethod
    def find(cls, folder: str, role: Role, address: str) -> Self | None:
        """The keys for an address that is listened on; None where it needs none.

        Raises: ConfigError for a file that is missing, holds no key, or can be read by others.
        """
        if not folder or not address.startswith("tcp://"):
            return None
        if not _listed(Path(folder), role):
            raise ConfigError(f"{folder} has no {role}*.public, so nobody could connect to {address}; {HOW}")
        return cls(role, _read_secret(Path(folder) / "controller.secret"))

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a socket that is not bound yet admit only clients on the list; `admit_listed` must run by then."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, self.role.encode())


class _Listed:
    """The check whether a public key stands in the folder now, so that a removed file ends what it allowed."""

    def __init__(self, folder: Path) -> None:
        import structlog  # only who admits others needs it: ranks and clients start faster without

        self._folder = folder
        self._log = structlog.get_logger("dist_attn.wire")

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer the authenticator's thread for a connection; it must not raise."""
        try:
            admitted = domain in ("api", "agent") and key in _listed(self._folder, domain)
        except (ConfigError, OSError) as error:
            self._log.error("public keys cannot be read, so nobody is admitted", error=str(error))
            return False
        if not admitted:
            self._log.warning("connection refused: its key is not listed", socket=domain, key=key.decode()[:8])
        return admitted


@contextlib.contextmanager
def admit_listed(context: "zmq.Context[zmq.Socket[bytes]]", folder: str) -> Iterator[None]:
    """Let sockets of the context with ServerKeys admit clients with public keys in the folder while the block runs."""
    if not folder:
        yield
        return
    from zmq.auth.thread import ThreadAuthenticator  # the controller's alone; it takes asyncio along

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    try:
        for role in ("api", "agent"):
            authenticator.configure_curve_callback(role, _Listed(Path(folder)))
        yield
    finally:
        authenticator.stop()


def make_keys(folder: Path) -> list[Path]:
    """Draw the pairs of controller, API and agents that are not there yet; returns the files that were written.

    Raises: ConfigError where a secret is there without its public key, or the folder cannot be written to.
    """
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for owner in OWNERS:
            secret, public = folder / f"{owner}.secret", folder / f"{owner}.public"
            if secret.exists() and public.exists():
                continue
            if secret.exists() or public.exists():
                raise ConfigError(f"{folder} has only one half of the pair {owner}; move it away, or bring the other")
            public_key, secret_key = zmq.curve_keypair()
            _write(secret, secret_key, 0o600)
            _write(public, public_key, 0o644)
            written += [secret, public]
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error.strerror}") from None
    return written


def _write(path: Path, key: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(key + b"\n")


def _listed(folder: Path, role: str) -> set[bytes]:
    return {_read_key(path) for path in folder.glob(f"{role}*.public")}


def _read_secret(path: Path) -> bytes:
    """Read a secret key that no other user can read."""
    try:
        found = open_to_others(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {HOW}") from None
    if found:
        raise ConfigError(found)
    return _read_key(path)


def open_to_others(path: Path) -> str:
    """Say what is wrong with the mode of a file of secrets, and what to do; "" where nobody else may read it.

    A group may read a file of root's, as where secrets are mounted.
    Raises: OSError for a file that cannot be looked at.
    """
    found = path.stat()
    mode, forbidden = stat.S_IMODE(found.st_mode), 0o037 if found.st_uid == 0 else 0o077
    return f"others may read {path} (mode {mode:o}); chmod 600 {path}" if mode & forbidden else ""


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            key = file.read(KEY_CHARACTERS + 2).strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {HOW}") from None
    try:
        z85.decode(key)
    except (ValueError, KeyError, ArithmeticError):
        key = b""
    if len(key) != KEY_CHARACTERS:
        raise ConfigError(f"{path} holds no key, which has {KEY_CHARACTERS} characters of Z85; {HOW}")
    return key

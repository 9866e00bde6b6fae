"""The blobs that a fake engine shares with a service: in a folder, in Redis, or, for streams alone, in memory."""

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from dist_attn.errors import StateDamagedError
from dist_attn.store.disk import SNAPSHOTS
from dist_attn.store.open import is_redis
from dist_attn.store.ports import new_name
from dist_attn.wire.messages import BeginState

__all__ = ["FakeStore"]


@dataclass
class FakeStore:
    """Puts and gets states at once, as no engine should; `blobs` has all that were put."""

    address: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)

    def put(self, data: bytes) -> tuple[str, str, int]:
        """The name, digest and size of a new blob."""
        name = new_name(time.time())
        self.blobs[name] = data
        if is_redis(self.address):
            import redis

            with redis.Redis.from_url(self.address) as client:
                client.rpush(f"{{dist-attn}}:blob:{name}", data)
        elif self.address:
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with path.open("wb") as file:
                os.chmod(path, 0o600)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        return name, hashlib.sha256(data).hexdigest(), len(data)

    def get(self, begin: BeginState) -> bytes:
        """The bytes of a state to begin with.

        Raises: StateDamagedError where they are not those that were stored.
        """
        data = self.read(begin.blob)
        if (len(data), hashlib.sha256(data).hexdigest()) != (begin.num_bytes, begin.digest):
            raise StateDamagedError(f"the state at {begin.position} is damaged; go on from another checkpoint")
        return data

    def read(self, name: str) -> bytes:
        """The bytes of a blob, none where it is not there."""
        if is_redis(self.address):
            import redis

            with redis.Redis.from_url(self.address) as client:
                return b"".join(client.lrange(f"{{dist-attn}}:blob:{name}", 0, -1))
        if not self.address:
            return self.blobs.get(name, b"")
        path = self._path(name)
        try:
            return path.read_bytes()
        except FileNotFoundError:  # also where it goes while it is looked for
            return b""

    def _path(self, name: str) -> Path:
        return Path(self.address) / SNAPSHOTS / name[-2:] / name

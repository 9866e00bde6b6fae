"""Blobs of states in an object store (S3, GCS, Azure) by obstore; a folder or Redis has the records of these blobs.

Each blob is an object, which is seen once it is whole. Credentials and endpoints come from the environment variables
of the store's own tools. What a writer that died has sent of a large one is removed by a rule of the bucket alone.
"""

import contextlib
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, final

from dist_attn.errors import ConfigError, MissingExtraError, StateDamagedError, StorageError, extra_hint
from dist_attn.store.ports import PIECE_BYTES, Blobs, born_at

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3://", "gs://", "az://", "memory://", "file://")
FOLDER, PLACE, OWNER = "snapshots/", "place", "owner"
PART_BYTES, PARTS = 8 << 20, 4  # of a large object, and how many are sent at once
RETRIES, RETRY_S = 4, 30


def connect(url: str) -> "ObjectStore":
    """Make a client for the bucket, and the folder in it, at an address; nothing is sent yet.

    Raises: MissingExtraError without obstore, ConfigError for an address or variables that it does not understand.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        words = f"states are to be kept at {url}, which needs obstore: {extra_hint('obstore')}"
        raise MissingExtraError(words) from None
    try:
        if url.startswith(("memory:", "file:")):
            return from_url(url)
        return from_url(url, retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)})
    except (BaseError, ValueError) as error:
        place, words = url.rpartition("@")[2], str(error).partition("\n")[0]  # neither a password nor a source
        raise ConfigError(f"{place} is no object store that can be used: {words[:300]}") from None


@final
class ObjectBlobs(Blobs):
    """The blobs as objects."""

    def __init__(self, store: "ObjectStore") -> None:
        self._store = store

    async def write(self, name: str, pieces: AsyncIterable[bytes]) -> None:
        """Send the object, in parts where it is large: else one request in place of three."""
        import obstore

        with _refusals():
            key, first, rest = FOLDER + name, bytearray(), aiter(pieces)
            async for piece in rest:
                first += piece
                if len(first) > PART_BYTES:
                    parts = _joined(bytes(first), rest)
                    await obstore.put_async(self._store, key, parts, chunk_size=PART_BYTES, max_concurrency=PARTS)
                    return
            await obstore.put_async(self._store, key, bytes(first), use_multipart=False)

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Read the object part by part."""
        import obstore

        with _refusals():
            try:
                size = (await obstore.head_async(self._store, FOLDER + name))["size"]
                for start in range(0, size, PART_BYTES):  # a client's deadline is that of a whole answer
                    end = min(start + PART_BYTES, size)
                    data = bytes(await obstore.get_range_async(self._store, FOLDER + name, start=start, end=end))
                    for at in range(0, len(data), PIECE_BYTES):
                        yield data[at : at + PIECE_BYTES]
            except FileNotFoundError:
                raise StateDamagedError(f"blob {name} is not there: it was deleted") from None

    async def has(self, name: str) -> bool:
        """Return whether the object is there."""
        import obstore

        with _refusals(), contextlib.suppress(FileNotFoundError):
            await obstore.head_async(self._store, FOLDER + name)
            return True
        return False

    async def delete(self, name: str) -> None:
        """Remove the object."""
        import obstore

        with _refusals(), contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, FOLDER + name)

    async def names(self) -> AsyncIterator[str]:
        """Iterate over the names of all objects."""
        import obstore

        with _refusals():
            async for found in obstore.list(self._store, FOLDER):
                for one in found:
                    name = one["path"].removeprefix(FOLDER)
                    if "/" not in name and born_at(name):  # others' objects are not ours to delete
                        yield name

    async def place(self) -> str:
        """Read the name from an object beside the blobs."""
        return await self._settled(PLACE, secrets.token_hex(16))

    async def owner(self, records: str) -> str:
        """Read the name from an object beside the blobs."""
        return await self._settled(OWNER, records)

    async def _settled(self, key: str, words: str) -> str:
        """The words of an object, which is made of these where it is not there."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _refusals():
            with contextlib.suppress(AlreadyExistsError):
                await obstore.put_async(self._store, key, words.encode(), mode="create")
            return bytes(await (await obstore.get_async(self._store, key)).bytes_async()).decode()

    async def close(self) -> None:
        """Close nothing: the connections end with the store."""


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of obstore into a StorageError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        words = str(error).partition("\n")[0][:300]  # its source follows
        raise StorageError(f"the object store did not do as asked: {words or type(error).__name__}") from None

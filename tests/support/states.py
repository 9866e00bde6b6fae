"""States of requests in memory, for controllers without files."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator

from dist_attn.control.state_files import StoredBlob
from dist_attn.errors import StateDamagedError, StorageError
from dist_attn.wire.messages import BeginState
from dist_attn.wire.snapshot import SnapshotParser


class MemoryStates:
    """`StateFiles`, but the bytes are kept in dictionaries; parts are of 10 bytes."""

    def __init__(self) -> None:
        self.unfinished: dict[tuple[int, int], bytes] = {}
        self.finished: dict[tuple[int, int], bytes] = {}
        self.kept: dict[int, bytes] = {}
        self.beginnings: dict[int, bytes] = {}
        self.held: dict[tuple[int, int], bytes] = {}
        self.blobs: dict[str, bytes] = {}
        """The store's."""
        self.place = "00"
        self.full = False
        self._results: deque[Callable[[], None]] = deque()

    def append(self, request: int, ordinal: int, start: int, data: bytes) -> None:
        before = self.unfinished.get((request, ordinal), b"") if start else b""
        if len(before) == start:
            self.unfinished[request, ordinal] = before + data

    def finish(self, request: int, ordinal: int, num_bytes: int) -> bool:
        whole = b"" if not num_bytes else self.unfinished.get((request, ordinal))
        if whole is None or len(whole) != num_bytes:
            return False
        self.finished[request, ordinal] = whole
        self.unfinished.pop((request, ordinal), None)
        return True

    def commit(self, request: int, ordinal: int) -> bool:
        whole = self.finished.pop((request, ordinal), None)
        if whole is not None:
            self.kept[request] = whole
        return whole is not None

    def stored(self, data: bytes) -> StoredBlob:
        """Put bytes into the store."""
        name = f"{len(self.blobs) + 1:042x}"
        self.blobs[name] = data
        return StoredBlob(name, hashlib.sha256(data).hexdigest(), len(data))

    def take_results(self) -> None:
        """Say what has come of the calls before this one."""
        for _ in range(len(self._results)):
            self._results.popleft()()

    def fetch(self, request: int, begin: BeginState, max_bytes: int, then) -> None:
        def result():
            data = self.blobs.get(begin.blob, b"")
            if hashlib.sha256(data).hexdigest() != begin.digest:
                return StateDamagedError(f"the state at {begin.position} is damaged")
            self.beginnings[request] = data
            parser = SnapshotParser(max_bytes=max_bytes)
            try:
                parser.feed(data)
                return parser.finish().header
            except Exception as error:
                return error

        self._results.append(lambda: then(result()))

    def begun(self, request: int) -> bool:
        self.kept[request] = self.beginnings.pop(request)
        return True

    def hold(self, request: int, ordinal: int) -> bool:
        self.held[request, ordinal] = self.kept[request]
        return True

    def put(self, request: int, ordinal: int, then) -> None:
        data = self.held[request, ordinal]
        result = StorageError("the store is full") if self.full else self.stored(data)

        def told():
            self.held.pop((request, ordinal), None)
            then(result)

        self._results.append(told)

    def discard(self, blob: str) -> None:
        del self.blobs[blob]

    def parts(self, request: int) -> Iterator[bytes]:
        whole = self.kept[request]
        return (whole[at : at + 10] for at in range(0, len(whole), 10))

    def forget_unfinished(self) -> None:
        self.unfinished.clear()
        self.finished.clear()

    def drop(self, request: int) -> None:
        self.unfinished = {key: data for key, data in self.unfinished.items() if key[0] != request}
        self.finished = {key: data for key, data in self.finished.items() if key[0] != request}
        self.held = {key: data for key, data in self.held.items() if key[0] != request}
        self.beginnings.pop(request, None)
        self.kept.pop(request, None)

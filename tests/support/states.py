"""States of requests in memory, for controllers without files."""

from collections.abc import Iterator


class MemoryStates:
    """`StateFiles`, but the bytes are kept in dictionaries; parts are of 10 bytes."""

    def __init__(self) -> None:
        self.unfinished: dict[tuple[int, int], bytes] = {}
        self.finished: dict[tuple[int, int], bytes] = {}
        self.kept: dict[int, bytes] = {}
        self.beginnings: dict[int, bytes] = {}
        self.offers: dict[tuple[int, int], bytes] = {}

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

    def begin(self, request: int, start: int, data: bytes) -> bool:
        before = self.beginnings.get(request, b"")
        assert len(before) == start
        self.beginnings[request] = before + data
        return True

    def begun(self, request: int) -> bool:
        self.kept[request] = self.beginnings.pop(request)
        return True

    def offer(self, request: int, ordinal: int) -> bool:
        self.offers[request, ordinal] = self.kept[request]
        return True

    def offered(self, request: int, ordinal: int, start: int, count: int) -> bytes:
        return self.offers[request, ordinal][start : start + count]

    def end_offer(self, request: int, ordinal: int) -> None:
        del self.offers[request, ordinal]

    def parts(self, request: int) -> Iterator[bytes]:
        whole = self.kept[request]
        return (whole[at : at + 10] for at in range(0, len(whole), 10))

    def forget_unfinished(self) -> None:
        self.unfinished.clear()
        self.finished.clear()

    def drop(self, request: int) -> None:
        self.unfinished = {key: data for key, data in self.unfinished.items() if key[0] != request}
        self.finished = {key: data for key, data in self.finished.items() if key[0] != request}
        self.offers = {key: data for key, data in self.offers.items() if key[0] != request}
        self.beginnings.pop(request, None)
        self.kept.pop(request, None)

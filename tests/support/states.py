"""States of sessions in memory, for controllers without files."""

from collections.abc import Iterator


class MemoryStates:
    """A `StateKeeper` that keeps bytes in dictionaries; parts are of 10 bytes."""

    def __init__(self) -> None:
        self.unfinished: dict[tuple[int, int], bytes] = {}
        self.finished: dict[tuple[int, int], bytes] = {}
        self.kept: dict[int, bytes] = {}
        self.beginnings: dict[int, bytes] = {}
        self.offers: dict[tuple[int, int], bytes] = {}

    def append(self, session: int, ordinal: int, start: int, data: bytes) -> None:
        before = self.unfinished.get((session, ordinal), b"") if start else b""
        if len(before) == start:
            self.unfinished[session, ordinal] = before + data

    def finish(self, session: int, ordinal: int, num_bytes: int) -> bool:
        whole = b"" if not num_bytes else self.unfinished.get((session, ordinal))
        if whole is None or len(whole) != num_bytes:
            return False
        self.finished[session, ordinal] = whole
        self.unfinished.pop((session, ordinal), None)
        return True

    def commit(self, session: int, ordinal: int) -> bool:
        whole = self.finished.pop((session, ordinal), None)
        if whole is not None:
            self.kept[session] = whole
        return whole is not None

    def begin(self, session: int, start: int, data: bytes) -> bool:
        before = self.beginnings.get(session, b"")
        assert len(before) == start
        self.beginnings[session] = before + data
        return True

    def begun(self, session: int) -> bool:
        self.kept[session] = self.beginnings.pop(session)
        return True

    def offer(self, session: int, ordinal: int) -> bool:
        self.offers[session, ordinal] = self.kept[session]
        return True

    def offered(self, session: int, ordinal: int, start: int, count: int) -> bytes:
        return self.offers[session, ordinal][start : start + count]

    def end_offer(self, session: int, ordinal: int) -> None:
        del self.offers[session, ordinal]

    def parts(self, session: int) -> Iterator[bytes]:
        whole = self.kept[session]
        return (whole[at : at + 10] for at in range(0, len(whole), 10))

    def forget_unfinished(self) -> None:
        self.unfinished.clear()
        self.finished.clear()

    def drop(self, session: int) -> None:
        self.unfinished = {key: data for key, data in self.unfinished.items() if key[0] != session}
        self.finished = {key: data for key, data in self.finished.items() if key[0] != session}
        self.offers = {key: data for key, data in self.offers.items() if key[0] != session}
        self.beginnings.pop(session, None)
        self.kept.pop(session, None)

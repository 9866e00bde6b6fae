"""States of sessions in memory, for controllers without files."""

from collections.abc import Iterator


class MemoryStates:
    """A `StateKeeper` that keeps bytes in dictionaries; parts are of 10 bytes."""

    def __init__(self) -> None:
        self.unfinished: dict[tuple[int, int], bytes] = {}
        self.finished: dict[tuple[int, int], bytes] = {}
        self.kept: dict[int, bytes] = {}

    def append(self, session: int, rank: int, start: int, data: bytes) -> None:
        before = self.unfinished.get((session, rank), b"") if start else b""
        if len(before) == start:
            self.unfinished[session, rank] = before + data

    def finish(self, session: int, rank: int, position: int, num_bytes: int) -> bool:
        whole = b"" if not num_bytes else self.unfinished.get((session, rank))
        if whole is None or len(whole) != num_bytes:
            return False
        self.finished[session, position] = whole
        self.unfinished.pop((session, rank), None)
        return True

    def commit(self, session: int, position: int) -> bool:
        whole = self.finished.pop((session, position), None)
        if whole is not None:
            self.kept[session] = whole
        return whole is not None

    def parts(self, session: int) -> Iterator[bytes]:
        whole = self.kept[session]
        return (whole[at : at + 10] for at in range(0, len(whole), 10))

    def forget_unfinished(self) -> None:
        self.unfinished.clear()
        self.finished.clear()

    def drop(self, session: int) -> None:
        self.unfinished = {key: data for key, data in self.unfinished.items() if key[0] != session}
        self.finished = {key: data for key, data in self.finished.items() if key[0] != session}
        self.kept.pop(session, None)

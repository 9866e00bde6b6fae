"""Texts that know which of their characters are a chat template's own, through all that a template does with them."""

import re
from collections.abc import Iterable, Mapping
from typing import Self, SupportsIndex, cast, final

__all__ = ["SpecialTokens", "TracedText", "joined"]

_OWN_RUN = re.compile(rb"\x01+")


@final
class TracedText(str):
    """A text with a byte for each of its characters: 1 for a character that is the template's own, else 0.

    It is equal to the plain text. Methods that are not overridden here give plain text, all of whose characters count
    as a client's.
    """

    __slots__ = ("_own",)
    _own: bytes

    def __new__(cls, text: str = "", own: bytes | None = None) -> Self:
        """Make a text; without `own` no character is the template's."""
        made = super().__new__(cls, text)
        made._own = bytes(len(made)) if own is None else own
        return made

    @classmethod
    def owned(cls, text: str) -> Self:
        """A text that is the template's in full."""
        return cls(text, b"\x01" * len(text))

    def _part(self, start: int, size: int) -> "TracedText":
        return TracedText(str.__getitem__(self, slice(start, start + size)), self._own[start : start + size])

    def _parts(self, texts: Iterable[str], between: int = 0) -> list[str]:
        """The parts of this text that are `texts`, in order; the gaps are `between` characters, or any if that is 0."""
        parts, at = list[str](), 0
        for text in texts:
            at = at if between else str.index(self, text, at)
            parts.append(self._part(at, len(text)))
            at += len(text) + between
        return parts

    def __str__(self) -> str:
        """Return itself: templates turn everything that they write into texts."""
        return self

    def __add__(self, other: str) -> str:
        return TracedText(str.__add__(self, other), self._own + _own(other))

    def __radd__(self, other: str) -> str:
        return TracedText(str.__add__(other, self), _own(other) + self._own)

    def __mul__(self, times: SupportsIndex) -> str:
        return TracedText(str.__mul__(self, times), self._own * times)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        own = self._own[key]
        return TracedText(str.__getitem__(self, key), own if isinstance(own, bytes) else bytes([own]))

    def join(self, values: Iterable[str], /) -> str:
        texts = list(values)
        return TracedText(str.join(self, texts), self._own.join(map(_own, texts)))

    def lstrip(self, chars: str | None = None, /) -> str:
        size = len(str.lstrip(self, chars))
        return self._part(len(self) - size, size)

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._part(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        size = len(str.removeprefix(self, prefix))
        return self._part(len(self) - size, size)

    def removesuffix(self, suffix: str, /) -> str:
        return self._part(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._parts(str.splitlines(self, keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._parts(str.partition(self, sep))))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._parts(str.rpartition(self, sep))))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:  # between all characters
            return str.replace(self, old, new, count)
        return TracedText(new, _own(new)).join(self.split(old, count))


def _own(text: str) -> bytes:
    return text._own if isinstance(text, TracedText) else bytes(len(text))


def joined(texts: Iterable[str]) -> TracedText:
    """The texts, one after the other."""
    return cast(TracedText, TracedText().join(texts))


@final
class SpecialTokens:
    """The special tokens that a template may give, with their ids by their text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._sizes: dict[str, list[int]] = {}  # by the first character; the longest first
        for size, first in sorted({(len(text), text[0]) for text in ids}, reverse=True):
            self._sizes.setdefault(first, []).append(size)
        self._first = re.compile(f"[{''.join(map(re.escape, self._sizes))}]" if ids else "(?!)")

    def cut(self, text: TracedText) -> list[str | int]:
        """The ids of special tokens whose characters are all the template's own, and the plain texts between them."""
        parts: list[str | int] = []
        plain, behind = str.__getitem__(text, slice(None)), 0
        for run in _OWN_RUN.finditer(_own(text)):
            at = run.start()
            while found := self._first.search(plain, at, run.end()):
                at = found.start()
                sizes = (size for size in self._sizes[found[0]] if at + size <= run.end())
                name = next((name for size in sizes if (name := plain[at : at + size]) in self._ids), None)
                if name is None:
                    at += 1
                else:
                    parts += [plain[behind:at], self._ids[name]]
                    at = behind = at + len(name)
        parts.append(plain[behind:])
        return [part for part in parts if part != ""]

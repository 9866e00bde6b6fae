"""One thing that `doctor` looked at: how it is, and what to do about it."""

from typing import Literal

import msgspec

__all__ = ["Finding", "broken", "missing", "ok", "unknown"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`needed`: without it the service does not start. `measured` holds figures for machines, units in their names."""

    name: str
    status: Literal["ok", "missing", "broken", "unknown"]
    detail: str
    advice: str = ""
    needed: bool = True
    measured: dict[str, float] = {}

    @property
    def blocks(self) -> bool:
        """Whether the service cannot start because of this."""
        return self.needed and self.status in ("missing", "broken")

    def line(self) -> str:
        """The finding in one line."""
        text = f"{self.detail}; {self.advice}" if self.advice else self.detail
        return f"{self.status:<8} {self.name:<10} {' '.join(text.split())}"


def ok(name: str, detail: str, **measured: float) -> Finding:
    """It is there and works."""
    return Finding(name=name, status="ok", detail=detail, measured=measured)


def missing(name: str, detail: str, advice: str, *, needed: bool = False) -> Finding:
    """It is not here; `advice` says how to get it."""
    return Finding(name=name, status="missing", detail=detail, advice=advice, needed=needed)


def broken(name: str, detail: str, advice: str, *, needed: bool = True) -> Finding:
    """It is here and does not work; `advice` says what to do."""
    return Finding(name=name, status="broken", detail=detail, advice=advice, needed=needed)


def unknown(name: str, detail: str, advice: str, *, needed: bool = True) -> Finding:
    """It could not be tried in the time there was, so it may work."""
    return Finding(name=name, status="unknown", detail=detail, advice=advice, needed=needed)

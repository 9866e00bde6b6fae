"""Stop strings in streamed text: hold back what may be the beginning of one, cut at the first."""

from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Lets text through up to the first stop string; the result does not depend on where the pieces are cut.

    Of several stop strings the one that is complete first counts, and of those the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain; empty from the stop on."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)
            certain, self._held = self._held[:start], ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

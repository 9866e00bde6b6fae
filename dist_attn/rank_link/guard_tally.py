"""The guarded denominators of all ranks and steps, added up by layer and head."""

from itertools import zip_longest

from dist_attn.wire.rank_messages import GuardCounts

__all__ = ["GuardTally"]


class GuardTally:
    """Counts that only grow; they outlive the groups of ranks that they come from."""

    def __init__(self) -> None:
        self._denominators = 0
        self._guarded: list[list[int]] = []

    def add(self, counts: GuardCounts) -> None:
        """What one rank counted in one step."""
        nothing: list[int] = []
        self._denominators += counts.denominators
        self._guarded = [
            [a + b for a, b in zip_longest(before, more, fillvalue=0)]
            for before, more in zip_longest(self._guarded, counts.guarded, fillvalue=nothing)
        ]

    def counts(self) -> GuardCounts | None:
        """The sums; None before the first denominator."""
        return GuardCounts(self._denominators, self._guarded) if self._denominators else None

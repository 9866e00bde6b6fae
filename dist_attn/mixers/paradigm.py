"""The four paradigms of token mixing: learned or fixed, dependent on the input or not."""

from enum import Enum

__all__ = ["Paradigm"]


class Paradigm(Enum):
    """P(X | theta) or P(X), with X in the mixing or not; the value is the paper's number.

    The paper counts state spaces as dependent on the input, because their state is; with constant matrices the weights
    between tokens are not.

    Reference: A Unified View of Long-Sequence Models, Sec. 2.
    """

    LEARNED_INDEPENDENT = 1
    LEARNED_DEPENDENT = 2
    FIXED_INDEPENDENT = 3
    FIXED_DEPENDENT = 4

    @property
    def learned(self) -> bool:
        """Whether the mixing has parameters."""
        return self in (Paradigm.LEARNED_INDEPENDENT, Paradigm.LEARNED_DEPENDENT)

    @property
    def dependent(self) -> bool:
        """Whether the mixing depends on the input."""
        return self in (Paradigm.LEARNED_DEPENDENT, Paradigm.FIXED_DEPENDENT)

    def __str__(self) -> str:
        return f"{'learned' if self.learned else 'fixed'}, {'dependent' if self.dependent else 'independent'}"

"""Needles in noise: long sequences of which few tokens matter, as many as one likes, each a function of seed and index.

Of all tokens `copies` are one symbol a of the first alphabet and `copies` one symbol b of the second, at random places;
all others are noise. The class is a + b, so both needles have to be found, however far apart they lie: who finds one of
them alone, or none, is right once in `symbols` times at best. Tokens are

    0 to noise - 1    noise        noise + a    the first alphabet        noise + symbols + b    the second
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Needles"]


@dataclass(frozen=True)
class Needles:
    """Sequences of `length` tokens, 2 `copies` of which matter."""

    seed: int
    length: int
    noise: int = 64
    symbols: int = 4
    copies: int = 4

    def __call__(self, index: int) -> tuple[NDArray[np.int64], int]:
        """The tokens of sequence `index`, and its class."""
        random = np.random.default_rng((self.seed, index))
        tokens = random.integers(0, self.noise, self.length, dtype=np.int64)
        first, second = random.integers(0, self.symbols, 2).tolist()
        places = random.choice(self.length, 2 * self.copies, replace=False)
        tokens[places[: self.copies]] = self.noise + first
        tokens[places[self.copies :]] = self.noise + self.symbols + second
        return tokens, first + second

    @property
    def classes(self) -> int:
        """Sums that there are."""
        return 2 * self.symbols - 1

    @property
    def vocab_size(self) -> int:
        """Noise and both alphabets."""
        return self.noise + 2 * self.symbols

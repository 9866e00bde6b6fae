"""How fast the ranks are, learned from the steps that they finish: steps are cut by it."""

from dataclasses import dataclass
from typing import final

from dist_attn.rank_link.rows import GRAIN

__all__ = ["Pace"]

WEIGHT = 0.2  # of the newest step in the moving averages


@final
@dataclass
class Pace:
    """Moving averages over steps; 0 for what has not been seen yet. Units: seconds."""

    token_s: float = 0.0
    """Of reading one token, all ranks working together."""
    round_s: float = 0.0
    """Of one round of decoding: a token for every request that decodes, on the rank that takes longest."""

    def learn(self, tokens: int, rounds: int, prefill_s: float, decode_s: float) -> None:
        """A step of all ranks that read `tokens` and decoded for `rounds` took so long for each.

        What reads less than a grain says more about what every block costs than about a token, and is left out.
        """
        if tokens >= GRAIN and prefill_s > 0:
            self.token_s = _moved(self.token_s, prefill_s / tokens)
        if rounds and decode_s > 0:
            self.round_s = _moved(self.round_s, decode_s / rounds)


def _moved(before: float, newest: float) -> float:
    return newest if not before else before + WEIGHT * (newest - before)

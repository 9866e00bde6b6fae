"""Floating-point operations of one token, two per multiply-add of a matrix product.

Element-wise work (norms, activations, sin and cos, the short convolution, the sums over chunks) is not counted; it is
what `Rates.prefill_efficiency` allows for.
"""

from dataclasses import dataclass

__all__ = ["TokenFlops"]


@dataclass(frozen=True)
class TokenFlops:
    """What one token costs, by part.

    Units: floating-point operations. `scores` are the causal half of a square of which blocked kernels compute all.
    """

    projections: float = 0.0  # q, k, v, output and gates
    features: float = 0.0  # the random projections of the feature map
    scores: float = 0.0  # attention between tokens
    state: float = 0.0  # recurrent state: what a token adds and what it reads
    mlp: float = 0.0
    readout: float = 0.0  # from a hidden state to the vocabulary

    @property
    def total(self) -> float:
        """All parts together."""
        return self.projections + self.features + self.scores + self.state + self.mlp + self.readout

"""Short convolutions.

Letters: B batch, D model size, K taps, L tokens.
"""

from typing import Literal

from pydantic import Field

from dist_attn.model_config.figures import FLOAT_BYTES, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer


class ConvolutionConfig(MixerConfig):
    """A depthwise convolution over the last `taps` tokens, or over as many around each token."""

    forms = {"": {}, "centred": {"centred": True}}  # noqa: RUF012

    kind: Literal["convolution"]
    taps: int = Field(default=16, ge=1, le=65_536)
    centred: bool = False

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return not self.centred

    def weights(self) -> Weights:
        """The weights of the taps K D, and of the output."""
        return linear(self.hidden_size, self.hidden_size, bias=True) + Weights(others=self.taps * self.hidden_size)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes of the last K - 1 tokens."""
        return 0 if self.centred else self.traffic(batch).edge_bytes

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of K - 1 edge tokens."""
        return Traffic(edge_bytes=FLOAT_BYTES * batch * (self.taps - 1) * self.hidden_size)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the output's projection; taps are no matrix product."""
        return TokenFlops(projections=2.0 * self.hidden_size**2)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of about seven tensors of [B, L, D], and of the tokens before them."""
        return FLOAT_BYTES * batch * self.hidden_size * (7 * tokens + 2 * self.taps)


register_mixer(ConvolutionConfig, "dist_attn.mixers.convolution:convolution")

"""What mixers are made of whose pattern does not depend on the tokens: convolutions, transforms, state spaces."""

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "ConvolutionConfig",
    "FourierConfig",
    "HippoConfig",
    "LsslConfig",
    "S4Config",
    "S4DConfig",
    "SgConvConfig",
    "TokenMlpConfig",
]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return False

    @property
    def streams(self) -> bool:
        """Whether there is a state to go on from."""
        return False


class ConvolutionConfig(_Config):
    """A depthwise convolution over the last `taps` tokens, or over as many around each token."""

    kind: Literal["convolution"]
    taps: int = Field(default=16, ge=1, le=65_536)
    centred: bool = False

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return not self.centred

    @property
    def streams(self) -> bool:
        """Whether there is a state to go on from."""
        return not self.centred


class FourierConfig(_Config):
    """The real part of the Fourier transform over tokens and features; nothing is learned."""

    kind: Literal["fnet"]
    norm: Literal["ortho"] | None = None  # None: sums as they are, as in FNet's own code


class TokenMlpConfig(_Config):
    """An MLP over the tokens, the same for each feature; it takes sequences of one length."""

    kind: Literal["mlp_mixer"]
    length: int = Field(ge=1)
    token_mlp_size: int = Field(ge=1)


class SgConvConfig(_Config):
    """A convolution as long as the sequence whose kernel is made of pieces at doubling scales."""

    kind: Literal["sgconv"]
    # Taps of one piece before it is stretched; the whole kernel has the first such length of at least `length`.
    piece: int = Field(default=64, ge=1)
    length: int = Field(ge=1)
    # Each coarser piece is smaller by 1 / decay; a range gives every channel its own.
    decay: float | tuple[float, float] = 2.0
    interpolation: Literal["linear", "nearest"] = "linear"
    bidirectional: bool = False

    @model_validator(mode="after")
    def _decays_are_positive(self) -> "SgConvConfig":
        decays = self.decay if isinstance(self.decay, tuple) else (self.decay,)
        if not all(0 < decay < math.inf for decay in decays):
            raise ValueError(f"decay {self.decay} must be above 0, and finite")
        return self

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return not self.bidirectional


class HippoConfig(_Config):
    """The memory of the whole past by LegS, of `state_size` coefficients for every channel."""

    kind: Literal["hippo"]
    state_size: int = Field(default=32, ge=1, le=512)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return True

    @property
    def streams(self) -> bool:
        """Whether there is a state to go on from."""
        return True


class _StateSpaceConfig(_Config):
    state_size: int = Field(default=64, ge=2, multiple_of=2)  # real numbers; half as many conjugate pairs
    # Steps of the channels are drawn between these, evenly on a logarithmic scale.
    dt_min: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    dt_max: float = Field(default=1e-1, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> Self:
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is above dt_max {self.dt_max}")
        return self


class LsslConfig(_StateSpaceConfig):
    """A state space with one full matrix for all channels, and some outputs for each."""

    kind: Literal["lssl"]
    outputs: int = Field(default=1, ge=1)  # of every channel
    # Of the generalised bilinear transform: 0 Euler, 1/2 trapezoidal, 1 backward.
    alpha: float = Field(default=0.5, ge=0, le=1)
    transition: Literal["fixed", "learned"] = "fixed"

    @model_validator(mode="after")
    def _longest_step_is_stable(self) -> Self:
        # LegS's eigenvalues are -1 to -N: a step takes the last to (1 - (1 - alpha) N dt) / (1 + alpha N dt), in size
        # above 1 from here on.
        if self.alpha < 0.5 and self.dt_max > (bound := 2 / ((1 - 2 * self.alpha) * self.state_size)):
            raise ValueError(
                f"dt_max {self.dt_max} was given with alpha {self.alpha} and state_size {self.state_size}: states grow "
                f"without end for steps above {bound:.3g}; give a smaller dt_max, or alpha of 0.5 or more"
            )
        return self

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return True

    @property
    def streams(self) -> bool:
        """Whether there is a state to go on from."""
        return True


class _EitherFormConfig(_StateSpaceConfig):
    # The state goes along the sequence, or the whole response is taken as one convolution, which can look both ways.
    form: Literal["scan", "convolution"] = "scan"
    bidirectional: bool = False

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.bidirectional and self.form != "convolution":
            raise ValueError("a bidirectional state space was asked for as a scan; give form = convolution")
        return self

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return not self.bidirectional

    @property
    def streams(self) -> bool:
        """Whether there is a state to go on from."""
        return self.form == "scan"


class S4DConfig(_EitherFormConfig):
    """A diagonal state space for every channel."""

    kind: Literal["s4d"]
    spectrum: Literal["lin", "inv", "real", "legs"] = "lin"
    rule: Literal["zoh", "bilinear"] = "zoh"


class S4Config(_EitherFormConfig):
    """A diagonal plus low-rank state space for every channel."""

    kind: Literal["s4"]

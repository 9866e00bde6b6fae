"""A small causal mixer that takes no packed texts: each token sees the sum of those so far."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

from dist_attn.comm import differentiable
from dist_attn.mixers import MixerConfig, MixerState, Paradigm, TokenFlops, TokenMixer, Traffic, Weights, linear
from dist_attn.mixers.base import FieldsState
from dist_attn.model_config.mixer import MIXERS, register_mixer
from dist_attn.ops import SequenceCall, SequenceOps, local_form
from dist_attn.sharded import Sharding, over_ranks


class RunningSumConfig(MixerConfig):
    """The configuration, whose costs are those of one projection."""

    kind: Literal["running_sum"] = "running_sum"

    @property
    def packs(self) -> bool:
        return False

    def weights(self) -> Weights:
        return linear(self.hidden_size, self.hidden_size)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        return 4 * batch * self.hidden_size

    def traffic(self, batch: int = 1) -> Traffic:
        return Traffic(gathered_bytes=self.state_bytes(batch=batch))

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        return TokenFlops(projections=2.0 * self.hidden_size**2)


@dataclass(frozen=True)
class RunningSumCall(SequenceCall[torch.Tensor]):
    """The tokens."""

    x_BLD: torch.Tensor

    operation: ClassVar[str] = "running_sum"
    along: ClassVar[tuple[str, ...]] = ("x_BLD",)
    packs: ClassVar[bool] = False


@local_form(RunningSumCall)
def sums_so_far(call: RunningSumCall) -> torch.Tensor:
    """The sum of all tokens up to each."""
    return call.x_BLD.cumsum(dim=1)


@over_ranks(RunningSumCall)
def sums_over_ranks(sharding: Sharding, call: RunningSumCall) -> torch.Tensor:
    """The sum of all tokens up to each of this rank's."""
    sums_PBD = differentiable.all_gather(sharding.comm, call.x_BLD.sum(dim=1), label="carry")
    return sums_so_far(call) + sums_PBD[: sharding.comm.rank].sum(dim=0)[:, None]


@dataclass(frozen=True)
class RunningSumState(FieldsState):
    """The sum of the tokens so far."""

    total_BD: torch.Tensor


class RunningSum(TokenMixer):
    """y = out(sum of the tokens so far), in one process."""

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: RunningSumConfig) -> None:
        super().__init__()
        self.config = config
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, RunningSumState]:
        (total_BD,) = (state or self.initial_state(len(x_BLD))).tensors()
        sums_BLD = total_BD[:, None] + ops.run(RunningSumCall(x_BLD))
        return self.out(sums_BLD), RunningSumState(total_BD + x_BLD.sum(dim=1))

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, RunningSumState]:
        (total_BD,) = state.tensors()
        return self.out(total_BD + x_BD), RunningSumState(total_BD + x_BD)

    def initial_state(self, batch: int) -> RunningSumState:
        return RunningSumState(self.out.weight.new_zeros((batch, self.config.hidden_size), requires_grad=False))


def register_running_sum(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the kind until the test ends, and return its name."""
    monkeypatch.setattr(MIXERS, "_entries", MIXERS.loaded())
    monkeypatch.setattr(MIXERS, "_places", dict(MIXERS._places))
    register_mixer(RunningSumConfig, RunningSum)
    return "running_sum"

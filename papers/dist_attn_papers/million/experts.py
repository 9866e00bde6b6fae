"""The sparse parts of the million-scale model: a Selector of tokens, and layers of experts that a router sends them to.

Letters: L tokens on this rank, N kept ones, D model width, E experts, K choices of a token, R rows of an expert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.heads import linear_float32, merge_heads, split_heads
from dist_attn.models.blocks import Recomputable
from dist_attn.models.dropout import Dropout, hashed, shifted
from dist_attn.ops import SequenceOps
from dist_attn.ops.softmax_attention import softmax_attention
from dist_attn_papers.million.config import RouterConfig, SelectorConfig
from dist_attn_papers.ops import route_tokens

MASK_53 = (1 << 53) - 1


def uniform_at(position_L: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Numbers in (0, 1), one for each position, [L] float64."""
    bits_L = shifted(hashed(position_L, seeds), 11) & MASK_53
    return (bits_L.double() + 0.5) / float(1 << 53)


def logistic_noise(position_L: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """The difference of two Gumbel variables for each position, [L] float64."""
    u_L = uniform_at(position_L, seeds)
    return torch.log(u_L) - torch.log1p(-u_L)


# The stretch of the hard-concrete distribution (Louizos et al. 2018, Sec. 2.2).
LOW, HIGH = -0.1, 1.1


@dataclass(frozen=True)
class ExpertGates:
    """The gates of the tokens here: what decides about each, its weight when it is kept, and how open its gate is."""

    score_L: torch.Tensor
    weight_L: torch.Tensor
    open_L: torch.Tensor
    threshold: float
    at_most: int | None


class Selector(nn.Module):
    """p = sigmoid(f(norm(x))), token by token, and the gates of `SelectorConfig` over it.

    With `against` it is trained to raise the loss that the rest of the model lowers: the gradient of its gates' weights
    is negated, and stops at its inputs. Its rate term stays as it is.

    Reference: A Unified View of Long-Sequence Models, Eq. 26 to 28; Jang et al. 2017 (Gumbel); Louizos et al. 2018.
    """

    def __init__(self, config: SelectorConfig, size: int, *, against: bool = False) -> None:
        super().__init__()
        self.config, self.against = config, against
        self.step = 0
        self.norm = nn.LayerNorm(size)
        self.map_in = None if config.hidden_size is None else nn.Linear(size, config.hidden_size)
        self.score = nn.Linear(config.hidden_size or size, 1)
        with torch.no_grad():
            self.score.bias.fill_(config.initial_logit + self.limit)
        if config.frozen:
            self.requires_grad_(False)

    @property
    def limit(self) -> float:
        """The threshold as a logit."""
        return math.log(self.config.threshold / (1.0 - self.config.threshold))

    @property
    def temperature(self) -> float:
        """The softness of gates at this step of training."""
        first, last = self.config.temperature, self.config.final_temperature
        done = min(1.0, self.step / self.config.anneal_steps)
        return first if last is None else float(first * (last / first) ** done)

    def forward(self, x_LD: torch.Tensor, position_L: torch.Tensor, total: int, draw: int) -> ExpertGates:
        """The gates of this process's tokens at `position_L` of `total`; `draw` numbers the noise of training."""
        gates = self._gates(x_LD, position_L, total, draw)
        return replace(gates, weight_L=_turn_round(gates.weight_L)) if self.against else gates

    def _gates(self, x_LD: torch.Tensor, position_L: torch.Tensor, total: int, draw: int) -> ExpertGates:
        logit_L = self._logits(x_LD)
        p_L = torch.sigmoid(logit_L)
        most = self.config.most_tokens
        if self.config.gate == "top_k":
            # The decimal number as it is written: the floats' 0.07 * 100 lies above 7.
            count = max(1, math.ceil(Fraction(str(self.config.rate)) * total))
            least = -math.inf
            return ExpertGates(p_L, p_L, p_L, least, count if most is None else min(count, most))
        if not self.training:
            return ExpertGates(p_L, torch.ones_like(p_L), p_L, self.config.threshold, most)
        above_L = logit_L - self.limit
        match self.config.gate:
            case "straight_through":
                soft_L = torch.sigmoid((p_L - self.config.threshold) / self.temperature)
                # In the rate term a closed gate counts 0: the soft one never gets there, and would close all others.
                kept_L = (p_L >= self.config.threshold).to(soft_L)
                open_L = kept_L + (soft_L - soft_L.detach())
                return ExpertGates(p_L, _straight_through(soft_L), open_L, self.config.threshold, most)
            case "soft":
                open_L = torch.sigmoid((p_L - self.config.threshold) / self.temperature)
                return ExpertGates(p_L, open_L, open_L, 0.0, most)
        noisy_L = torch.sigmoid((above_L + self._noise(above_L, position_L, draw)) / self.temperature)
        if self.config.gate == "gumbel":
            # The noise is above -a with probability sigmoid(a).
            return ExpertGates(noisy_L, _straight_through(noisy_L), torch.sigmoid(above_L), 0.5, most)
        stretched_L = (noisy_L * (HIGH - LOW) + LOW).clamp(0.0, 1.0)
        open_L = torch.sigmoid(above_L - self.temperature * math.log(-LOW / HIGH))
        return ExpertGates(stretched_L, stretched_L, open_L, torch.finfo(stretched_L.dtype).tiny, most)

    def rate_loss(self, share: torch.Tensor) -> torch.Tensor:
        """The loss of one sequence for its share of open gates; 0 where a fixed share is kept."""
        if self.config.gate == "top_k":
            return 0.0 * share
        over = share - self.config.rate
        if self.config.rate_penalty == "above":
            over = over.clamp(min=0.0)
        counts = min(1.0, self.step / self.config.rate_warmup) if self.config.rate_warmup else 1.0
        return counts * self.config.rate_weight * over.square()

    def _logits(self, x_LD: torch.Tensor) -> torch.Tensor:
        h_LD = self.norm(x_LD.detach() if self.against else x_LD)
        if self.map_in is not None:
            h_LD = torch.relu(linear_float32(self.map_in, h_LD))
        return linear_float32(self.score, h_LD)[:, 0]

    def _noise(self, like_L: torch.Tensor, position_L: torch.Tensor, draw: int) -> torch.Tensor:
        return logistic_noise(position_L, (self.config.seed, draw)).to(like_L)


def _straight_through(open_L: torch.Tensor) -> torch.Tensor:
    """1 with the gradient of the gate."""
    return 1.0 + (open_L - open_L.detach())


def _turn_round(x: torch.Tensor) -> torch.Tensor:
    """x with the opposite gradient."""
    return 2.0 * x.detach() - x


# A token that weighs less counts as one that weighs this much: its logarithm is a number in any precision.
LEAST_WEIGHT = 1e-6


class Expert(nn.Module):
    """Full attention and an MLP over the tokens of one expert: a block with norms before, less its residual."""

    def __init__(self, size: int, num_heads: int, mlp_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp_in = nn.Linear(size, mlp_size)
        self.mlp_out = nn.Linear(mlp_size, size)

    def forward(self, x_RD: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
        """[R, D] -> [R, D]; a token is seen by the others as much as it weighs.

        Cost: O(R^2 D); memory linear in R.
        """
        mixed_RD = self.out(self._attend(self.norm(x_RD), weight_R))
        inner = F.gelu(self.mlp_in(self.mlp_norm(x_RD + mixed_RD)), approximate="tanh")
        made_RD: torch.Tensor = mixed_RD + self.mlp_out(inner)
        return made_RD

    def _attend(self, x_RD: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x_RD)[None].chunk(3, dim=-1))
        if not len(x_RD):
            return merge_heads(v)[0]  # a rank without this expert: no rows, but the same parameters in the graph
        # exp(log w) as a factor of a key's weight, by one more feature: no mask, so the kernel without scores serves.
        scale = q.shape[-1] ** -0.5
        bias_R1 = (weight_R.clamp(min=LEAST_WEIGHT).log() / scale)[:, None].to(k.dtype)
        q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        k = torch.cat([k, bias_R1.expand(1, self.num_heads, -1, -1)], dim=-1)
        return merge_heads(softmax_attention(q, k, v, causal=False, scale=scale))[0]


class ExpertLayer(Recomputable):
    """x + sum over the chosen experts of gate * expert(x), in the order of the sequence.

    Experts are dealt over ranks by `route_tokens`; every rank has the parameters of all and calls all of them, most
    with no rows. Tokens for which no chosen expert has room go on as they are.

    Reference: A Unified View of Long-Sequence Models, Fig. 4 and Eq. 27, with parameters of each expert's own and the
    sum over chosen experts; Fedus et al. 2022 (one choice, balance loss); Lepikhin et al. 2021 (two).
    """

    def __init__(self, config: RouterConfig, size: int, num_heads: int, mlp_size: int) -> None:
        super().__init__()
        self.config = config
        self.router_norm = nn.LayerNorm(size)
        self.router = nn.Linear(size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(size, num_heads, mlp_size) for _ in range(config.num_experts))
        self.dropout = Dropout()

    def capacity(self, total: int) -> int:
        """Assignments that an expert has room for, of `total` tokens."""
        # The decimal number as it is written: the floats' 1.1 * 100 lies above 110.
        factor = Fraction(str(self.config.capacity_factor))
        fair = math.ceil(factor * self.config.choices * total / self.config.num_experts)
        return max(1, fair if self.config.most_tokens is None else min(fair, self.config.most_tokens))

    def forward(
        self, x_ND: torch.Tensor, weight_N: torch.Tensor, ops: SequenceOps, draw: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The tokens after the experts, the balance E sum_e f_e P_e, and how many assignments were dropped.

        `draw` numbers the sequence for dropout.

        Shapes: x [N local, D], weight [N local] -> [N local, D]; the others are equal on all ranks.
        Cost: two all-to-alls of up to choices N D elements, an all-reduce of 2 E, and the experts' own.
        """
        return self._run(self._forward, x_ND, weight_N, ops, draw)

    def _forward(
        self, x_ND: torch.Tensor, weight_N: torch.Tensor, ops: SequenceOps, draw: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        total, size = ops.total_length(len(x_ND)), x_ND.shape[1]
        p_NE = torch.softmax(linear_float32(self.router, self.router_norm(x_ND)), dim=-1)
        gate_NK, expert_NK = p_NE.topk(self.config.choices, dim=-1)
        if self.config.choices > 1:
            gate_NK = gate_NK / gate_NK.sum(dim=-1, keepdim=True)
        routed = route_tokens(
            torch.cat([x_ND, weight_N[:, None].to(x_ND.dtype)], dim=1),
            expert_NK,
            num_experts=self.config.num_experts,
            capacity=self.capacity(total),
            ops=ops,
        )
        made = [
            expert(rows[:, :size], rows[:, size])
            for expert, rows in zip(cast(list[Expert], list(self.experts)), routed.by_expert(), strict=True)
        ]
        added_KND = routed.restore_order(torch.cat(made).to(x_ND.dtype))
        added_ND = (gate_NK.T[..., None].to(x_ND.dtype) * added_KND).sum(dim=0)
        z_ND = x_ND + self.dropout(added_ND[None], ops, draw)[0]
        return z_ND, self._balance(p_NE, expert_NK[:, 0], total, ops), routed.dropped

    def _balance(self, p_NE: torch.Tensor, first_N: torch.Tensor, total: int, ops: SequenceOps) -> torch.Tensor:
        chosen_NE = F.one_hot(first_N, self.config.num_experts).to(p_NE.dtype)
        sums = ops.sum_over_sequence(torch.cat([chosen_NE, p_NE], dim=1)[None])[0] / total
        share_E, probability_E = sums.split(self.config.num_experts)
        balance: torch.Tensor = self.config.num_experts * (share_E * probability_E).sum()
        return balance

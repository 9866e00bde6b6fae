"""A layer of experts: a router sends each token to one or two of them; inside one, all tokens attend to each other."""

import math
from fractions import Fraction
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.heads import linear_float32, merge_heads, split_heads
from dist_attn.model_config.million import RouterConfig
from dist_attn.models.recomputation import Recomputable
from dist_attn.ops import SequenceOps
from dist_attn.ops.softmax_attention import softmax_attention

# A token that weighs less counts as one that weighs this much: its logarithm is a number in any precision.
LEAST_WEIGHT = 1e-6


class Expert(nn.Module):
    """What full attention and an MLP add to the tokens of one expert: a block with norms before, less its residual."""

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

    Experts are dealt over ranks by `ops.route_tokens`; every rank has the parameters of all and calls all of them, most
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

    def capacity(self, total: int) -> int:
        """Assignments that an expert has room for, of `total` tokens."""
        # The decimal number as it is written: the floats' 1.1 * 100 lies above 110.
        factor = Fraction(str(self.config.capacity_factor))
        fair = math.ceil(factor * self.config.choices * total / self.config.num_experts)
        return max(1, fair if self.config.most_tokens is None else min(fair, self.config.most_tokens))

    def forward(
        self, x_ND: torch.Tensor, weight_N: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The tokens after the experts, the balance E sum_e f_e P_e, and how many assignments were dropped.

        Shapes: x [N local, D], weight [N local] -> [N local, D]; the others are equal on all ranks.
        Cost: two all-to-alls of up to choices N D elements, an all-reduce of 2 E, and the experts' own.
        """
        return self._run(self._forward, x_ND, weight_N, ops)

    def _forward(
        self, x_ND: torch.Tensor, weight_N: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        total, size = ops.total_length(len(x_ND)), x_ND.shape[1]
        p_NE = torch.softmax(linear_float32(self.router, self.router_norm(x_ND)), dim=-1)
        gate_NK, expert_NK = p_NE.topk(self.config.choices, dim=-1)
        if self.config.choices > 1:
            gate_NK = gate_NK / gate_NK.sum(dim=-1, keepdim=True)
        routed = ops.route_tokens(
            torch.cat([x_ND, weight_N[:, None].to(x_ND.dtype)], dim=1),
            expert_NK,
            num_experts=self.config.num_experts,
            capacity=self.capacity(total),
        )
        made = [
            expert(rows[:, :size], rows[:, size])
            for expert, rows in zip(cast(list[Expert], list(self.experts)), routed.by_expert(), strict=True)
        ]
        added_KND = routed.restore_order(torch.cat(made).to(x_ND.dtype))
        z_ND = x_ND + (gate_NK.T[..., None].to(x_ND.dtype) * added_KND).sum(dim=0)
        return z_ND, self._balance(p_NE, expert_NK[:, 0], total, ops), routed.dropped

    def _balance(self, p_NE: torch.Tensor, first_N: torch.Tensor, total: int, ops: SequenceOps) -> torch.Tensor:
        chosen_NE = F.one_hot(first_N, self.config.num_experts).to(p_NE.dtype)
        sums = ops.sum_over_sequence(torch.cat([chosen_NE, p_NE], dim=1)[None])[0] / total
        share_E, probability_E = sums.split(self.config.num_experts)
        balance: torch.Tensor = self.config.num_experts * (share_E * probability_E).sum()
        return balance

"""Linear attention over layouts: which of its forms a call takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from dist_attn.ops import Denominator, FeatureMap, LinearState
from dist_attn.ops.linear_attention import Implementation
from dist_attn.ops.linear_attention.prefix import Attend, prefix_then_causal
from dist_attn.sharded.call_checks import CallChecks
from dist_attn.sharded.carry_scan import sharded_linear_attention
from dist_attn.sharded.in_order import attention_in_order
from dist_attn.sharded.packed_linear import sharded_packed_linear_attention
from dist_attn.sharded.prefix_scan import Exchange
from dist_attn.sharded.two_layouts import over_two_layouts

__all__ = ["ShardedLinear"]


@dataclass(frozen=True)
class ShardedLinear:
    """Linear attention of queries over keys on the layouts of `checks`, whose states travel by `exchange`."""

    checks: CallChecks
    exchange: Exchange
    implementation: Implementation

    def attend(
        self,
        q_BHLK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        *,
        feature_map: FeatureMap | None = None,
        log_gate_BHS: torch.Tensor | None = None,
        key_scale_BHS: torch.Tensor | None = None,
        causal: bool = True,
        state: LinearState | None = None,
        denominator: Denominator | None = None,
        prefix: int = 0,
    ) -> tuple[torch.Tensor, LinearState]:
        """`ops.linear_attention` on this rank's slice, with documents where the layouts have some."""
        comm, layout, memory = self.checks.comm, self.checks.layout, self.checks.memory
        attend: Attend = partial(self._form(), feature_map=feature_map, denominator=denominator)
        if causal and memory != layout:
            self.checks.refuse_deterministic("causal attention over keys on a layout of their own")
            attend = over_two_layouts(comm, layout, memory, attend, prefix=prefix)
        if prefix:
            self.checks.refuse_deterministic("a prefix that attends to itself in full")
            here, there = (max(0, prefix - part.range(comm.rank)[0]) for part in (layout, memory))
            return prefix_then_causal(
                attend,
                q_BHLK,
                k_BHSK,
                v_BHSV,
                log_gate_BHS=log_gate_BHS,
                key_scale_BHS=key_scale_BHS,
                state=state,
                queries=here,
                keys=there,
            )
        return attend(
            q_BHLK,
            k_BHSK,
            v_BHSV,
            log_gate_BHS=log_gate_BHS,
            key_scale_BHS=key_scale_BHS,
            causal=causal,
            state=state,
        )

    def _form(self) -> Callable[..., tuple[torch.Tensor, LinearState]]:
        """How it is done here: over documents, with the bits of one rank, or by a scan of carries."""
        comm = self.checks.comm
        if self.checks.packed:
            self.checks.refuse_memory("linear_attention")
            self.checks.refuse_deterministic("linear attention over packed documents")
            return partial(
                sharded_packed_linear_attention, comm, self.checks.layout, implementation=self.implementation
            )
        if self.checks.deterministic:
            return partial(attention_in_order, comm, implementation=self.implementation)
        return partial(sharded_linear_attention, comm, exchange=self.exchange, implementation=self.implementation)

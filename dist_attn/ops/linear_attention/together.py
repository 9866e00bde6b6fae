"""Full attention inside each of many short documents: several whole documents at a time, by one masked product."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dist_attn.ops.documents import same_document
from dist_attn.ops.linear_attention.block import AttentionBlock, bounded
from dist_attn.ops.scan import scan

__all__ = ["attend_together"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


def attend_together(
    block: AttentionBlock, groups: Sequence[tuple[int, int]], sequence: _Optional, output_dtype: torch.dtype
) -> torch.Tensor:
    """Outputs [B, H, L, V] of queries that see all keys of their own document and none of another.

    Shapes: sequence is q [B, H, L, K], k, v [B, H, L, V], log gate and key scale [B, H, L] or None, and the flags
        [1, 1, L] of where documents start; `groups` are ranges of whole documents that tile L.
    Cost: O(T) per token for groups of T tokens; memory flat in L.
    """
    v_BHLV = sequence[2]
    assert v_BHLV is not None  # always there
    parameters = () if block.feature_map is None else block.feature_map.tensors()
    out, _ = scan(
        _Together(block), groups, sequence, (), parameters, output_shape=tuple(v_BHLV.shape), output_dtype=output_dtype
    )
    return out


@dataclass(frozen=True)
class _Together:
    block: AttentionBlock
    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        q, k, v, log_gate, key_scale, starts = sequence
        assert q is not None and k is not None and v is not None and starts is not None
        dtype = self.block.dtype
        same_TT = same_document(starts[0, 0])
        weight_BHT = torch.ones_like(v[..., 0], dtype=dtype) if key_scale is None else key_scale.to(dtype)
        if log_gate is not None:
            # Every query reads the state after its document's last key: key i is left with all gates after it.
            weight_BHT = weight_BHT * (bounded(log_gate, dtype) @ same_TT.tril(-1).to(dtype)).exp()
        v1_BHTW = F.pad(v.to(dtype), (0, 1), value=1.0) * weight_BHT[..., None]
        phi_q, phi_k = self.block.features(q, parameters), self.block.features(k, parameters)
        pairs_BHTT = (phi_q @ phi_k.transpose(-1, -2)).masked_fill(~same_TT, 0.0)
        num_BHTW = pairs_BHTT @ v1_BHTW
        mass_BHT = weight_BHT @ same_TT.to(dtype)
        return self.block.denominator.divide(num_BHTW[..., :-1], num_BHTW[..., -1], mass_BHT), ()

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        return ()

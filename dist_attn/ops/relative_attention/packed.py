"""Relative attention inside each of many packed documents: several short ones at a time, long ones one by one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dist_attn.ops.documents import check_documents, document_runs, same_document, split_tokens, start_flags
from dist_attn.ops.linear_attention.call import Implementation
from dist_attn.ops.relative_attention.implementation import choose_relative
from dist_attn.ops.relative_attention.state import check_relative_shapes, normalised
from dist_attn.ops.relative_attention.windowed import relative_attention
from dist_attn.ops.scan import scan

__all__ = ["packed_relative_attention"]

# So many tokens of whole documents share one masked score matrix.
TOGETHER_TOKENS = 128

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


def packed_relative_attention(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
    documents: tuple[int, ...],
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """`relative_attention` in which every document attends to itself alone.

    Shapes: phi_q, phi_k [B, H, L, K], v [B, H, L, V], phi_rp [H, R, K] -> [B, H, L, V].
    Cost: O(128) per token of short documents, in one walk whose memory is flat in L; one call per long document.
    Raises: ShapeError when shapes do not fit together; ConfigError for kernels asked for by name, which take one
        sequence.
    """
    check_relative_shapes(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK)
    choose_relative(implementation, phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, packed=True)
    length = phi_q_BHLK.shape[2]
    check_documents(documents, length, phi_k_BHLK.shape[2])
    dtype = torch.promote_types(v_BHLV.dtype, torch.float32)
    starts_11L = start_flags(documents, length, phi_q_BHLK.device)[None, None]
    outs = []
    runs = document_runs(documents, length, TOGETHER_TOKENS)
    parts = split_tokens((phi_q_BHLK, phi_k_BHLK, v_BHLV, starts_11L), [(a, b) for a, b, _ in runs])
    for (_, _, groups), (q, k, v, starts) in zip(runs, parts, strict=True):
        assert q is not None and k is not None and v is not None and starts is not None
        if not groups:
            outs.append(relative_attention(q, k, v, phi_rp_HRK, causal=causal))
            continue
        out, _ = scan(
            _Together(causal, dtype),
            groups,
            (q, k, v, starts),
            (),
            (phi_rp_HRK,),
            output_shape=tuple(v.shape),
            output_dtype=v.dtype,
        )
        outs.append(out)
    if not outs:
        return relative_attention(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, causal=causal)
    return torch.cat(outs, dim=2)


@dataclass(frozen=True)
class _Together:
    """The whole score matrix of a few documents, 0 between two of them."""

    causal: bool
    dtype: torch.dtype
    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        q, k, v, starts = sequence
        assert q is not None and k is not None and v is not None and starts is not None
        q_BHTK, k_BHTK, v_BHTV, rp_HRK = (t.to(self.dtype) for t in (q, k, v, parameters[0]))
        reach = rp_HRK.shape[1] // 2
        at_T = torch.arange(q.shape[2], device=q.device)
        row_TT = (at_T[None, :] - at_T[:, None]).clamp(-reach, reach) + reach
        scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2)
        positions_BHTR = q_BHTK @ rp_HRK.transpose(-1, -2)
        scores_BHTT = scores_BHTT + positions_BHTR.gather(-1, row_TT.expand_as(scores_BHTT))
        seen_TT = same_document(starts[0, 0])
        scores_BHTT = scores_BHTT.masked_fill(~(seen_TT.tril() if self.causal else seen_TT), 0.0)
        return normalised(scores_BHTT @ F.pad(v_BHTV, (0, 1), value=1.0), self.dtype), ()

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        return ()

"""Numerators of queries that see the keys up to them: a kernel state, the values of a window, one sum of older values.

The chunks of a block are computed together, each with the state, the window and the sum that stand before it.

Reference: Scaleformer, Eq. 9 to 11 and Algorithm 2.
"""

from dataclasses import dataclass

import torch

from dist_attn.ops.linear_attention.streaming import block_ranges
from dist_attn.ops.relative_attention.chunk_scores import CHUNK_TOKENS, scores_before
from dist_attn.ops.relative_attention.state import RelativeState, WindowState
from dist_attn.ops.scan import scan

__all__ = ["carry_of", "numerators", "walk"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class _WindowPass:
    """One block of the causal pass: numerators [B, H, T, W]; without keys, of the position scores alone.

    `own`: whether a query sees its own key.
    """

    own: bool
    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        q, k, v1 = sequence
        (rp_HRK,) = parameters
        assert q is not None and v1 is not None
        *sums, far_BHW, near_BHTW = carry
        tokens, width = v1.shape[2], near_BHTW.shape[2]
        # A block has whole chunks, or it is the last one and less than a chunk.
        chunk = CHUNK_TOKENS if tokens % CHUNK_TOKENS == 0 else tokens
        v1_BHNCW = v1.unflatten(2, (-1, chunk))
        scores_BHNCJ = scores_before((q @ rp_HRK.transpose(-1, -2)).unflatten(2, (-1, chunk)), own=self.own)
        seen_BHJW = torch.cat([near_BHTW, v1], dim=2)
        leaving_BHNW = seen_BHJW[:, :, :tokens].unflatten(2, (-1, chunk)).sum(3)
        far_BHNW, far_BHW = _running(far_BHW, leaving_BHNW)
        window_BHNTW = _windows(seen_BHJW, width, chunk)
        older_BHNJW = torch.cat([far_BHNW[:, :, :, None], window_BHNTW], dim=3)
        num_BHNCW = scores_BHNCJ[..., : 1 + width] @ older_BHNJW
        own_BHNCC = scores_BHNCJ[..., 1 + width :]
        if k is not None:
            q_BHNCK, k_BHNCK = q.unflatten(2, (-1, chunk)), k.unflatten(2, (-1, chunk))
            sz_BHNMW, sz_BHMW = _running(sums[0], k_BHNCK.transpose(-1, -2) @ v1_BHNCW)
            num_BHNCW = num_BHNCW + q_BHNCK @ sz_BHNMW
            own_BHNCC = own_BHNCC + (q_BHNCK @ k_BHNCK.transpose(-1, -2)).tril()
            sums = [sz_BHMW]
        num_BHNCW = num_BHNCW + own_BHNCC @ v1_BHNCW
        # The copy, so that a state that is kept does not keep the block.
        return num_BHNCW.flatten(2, 3), (*sums, far_BHW, seen_BHJW[:, :, tokens:].clone())

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        _, k, v1 = sequence
        assert v1 is not None
        window = WindowState(carry[-2], carry[-1], 0)
        window = window.combine(WindowState.of(v1, window.near_BHTW.shape[2]))
        sums = carry[:-2] if k is None else (carry[0] + k.transpose(-1, -2) @ v1,)
        return (*sums, window.far_BHW, window.near_BHTW)


def numerators(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor | None,
    v1_BHLW: torch.Tensor,
    rp_HRK: torch.Tensor,
    *,
    own: bool,
    before: RelativeState | WindowState | None = None,
) -> torch.Tensor:
    """Numerators [B, H, L, W] over the keys up to each query and those in `before`, not yet divided.

    v1 is v with a ones column, so the last column is the denominator; rp has the rows -k .. 0. Without keys only the
    position scores count (then `before` is a window alone). `own`: whether a query sees its own key.
    """
    if isinstance(before, RelativeState):
        carry = carry_of(before, v1_BHLW.dtype)
    else:
        window = WindowState.of(v1_BHLW[:, :, :0], max(rp_HRK.shape[1] - 2, 0)) if before is None else before
        carry = (window.far_BHW, window.near_BHTW)
        if k_BHLK is not None:
            batch, heads, _, columns = v1_BHLW.shape
            carry = (v1_BHLW.new_zeros((batch, heads, k_BHLK.shape[3], columns)), *carry)
    return walk(q_BHLK, k_BHLK, v1_BHLW, rp_HRK, own, carry)[0]


def walk(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor | None,
    v1_BHLW: torch.Tensor,
    rp_HRK: torch.Tensor,
    own: bool,
    carry: _Tensors,
) -> tuple[torch.Tensor, _Tensors]:
    """Numerators after `carry` (of `carry_of`; without keys its last two), and the carry behind the last token."""
    return scan(
        _WindowPass(own),
        block_ranges(v1_BHLW.shape),
        (q_BHLK, k_BHLK, v1_BHLW),
        carry,
        (rp_HRK,),
        output_shape=tuple(v1_BHLW.shape),
        output_dtype=v1_BHLW.dtype,
    )


def carry_of(state: RelativeState, dtype: torch.dtype) -> _Tensors:
    """What the walk carries, of a state: kernel sums, the sum of far values, the near ones."""
    return (state.sz_BHMW.to(dtype), state.window.far_BHW.to(dtype), state.window.near_BHTW.to(dtype))


def _running(start: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`start` and the N parts [B, H, N, ...] added up: the sum before each part, and that of all."""
    sums = [start]
    for part in parts.unbind(2):
        sums.append(sums[-1] + part)
    return torch.stack(sums[:-1], dim=2), sums[-1]


def _windows(seen_BHJW: torch.Tensor, width: int, chunk: int) -> torch.Tensor:
    """[B, H, N, T, W]: the T = `width` values before each chunk, of all that the block sees."""
    tokens = seen_BHJW.shape[2] - width
    if width <= chunk:
        chunks_BHNCW: torch.Tensor = seen_BHJW[:, :, :tokens].unflatten(2, (-1, chunk))
        return chunks_BHNCW[:, :, :, :width]
    # Windows that overlap.
    return seen_BHJW[:, :, : tokens + width - chunk].unfold(2, width, chunk).transpose(-1, -2)

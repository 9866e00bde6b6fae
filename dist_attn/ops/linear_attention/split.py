"""Causal attention in two parts: sums over the tokens at hand, and what is added when the state before them is known.

o_t = (N_t + Lambda_t phi(q_t) S) / den(d_t + Lambda_t phi(q_t).z), where N and d are sums from nothing, (S, z) the
state before the first token and Lambda_t the product of the gates so far. Numerator and denominator stay apart until
the global denominator is known. So the keys are walked once, and the state may be on its way meanwhile.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import check_documents, start_flags
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.block import AttentionBlock, Carry, bounded
from dist_attn.ops.linear_attention.differentiable import attention_again
from dist_attn.ops.linear_attention.implementation import Choice, Implementation, choose
from dist_attn.ops.linear_attention.joined import Rooms
from dist_attn.ops.linear_attention.native import native_attention
from dist_attn.ops.linear_attention.native_forms import natively_completed
from dist_attn.ops.linear_attention.streaming import block_ranges, check_shapes, prepare, state_dtype, to_state
from dist_attn.ops.scan import scan
from dist_attn.ops.state import LinearState

__all__ = ["complete_sums", "local_sums", "tokens_until_forgotten"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


def local_sums(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHL: torch.Tensor | None = None,
    key_scale_BHL: torch.Tensor | None = None,
    state: LinearState | None = None,
    dtype: torch.dtype = torch.float32,
    documents: tuple[int, ...] | None = None,
    implementation: Implementation = "auto",
    rooms: Rooms | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """Numerators, denominators and masses of causal attention, not divided yet, and the state after the last key.

    They count `state`, which is that of the tokens at hand that come first, and nothing before it; with `documents`,
    the positions at which documents start, what is of a token's own document. `implementation`, `rooms`: as there.

    Shapes: as `linear_attention` with as many queries as keys -> [B, H, L, V + 2] of at least the precision `dtype`.
    Raises: ConfigError for an implementation that cannot take this call.
    """
    check_shapes(q_BHLK, k_BHLK, v_BHLV, log_gate_BHL, key_scale_BHL)
    dtype = state_dtype(q_BHLK, k_BHLK, v_BHLV, state=state, at_least=dtype)
    choice = choose(implementation, q_BHLK, k_BHLK, v_BHLV, feature_map=feature_map, state=state, sums=dtype)
    if documents:
        check_documents(documents, q_BHLK.shape[2], k_BHLK.shape[2])
    if choice.implementation != "streaming":
        sequence = (q_BHLK, k_BHLK, v_BHLV, log_gate_BHL, key_scale_BHL)
        return _sums_by_kernels(choice, sequence, feature_map, state, documents or (), rooms)
    starts_11L = None
    if documents:
        starts_11L = start_flags(documents, k_BHLK.shape[2], k_BHLK.device)[None, None]
    carry, block, reset_BH = prepare(k_BHLK, v_BHLV, feature_map, state, Denominator(), dtype)
    sums_BHLX, after = scan(
        _Sums(block),
        block_ranges(v_BHLV.shape),
        (q_BHLK, k_BHLK, v_BHLV, log_gate_BHL, key_scale_BHL, starts_11L),
        carry,
        () if feature_map is None else feature_map.tensors(),
        output_shape=(*v_BHLV.shape[:3], v_BHLV.shape[3] + 2),
        output_dtype=dtype,
    )
    return sums_BHLX, to_state(Carry(*after), torch.ones_like(reset_BH) if documents else reset_BH)


def complete_sums(
    sums_BHLX: torch.Tensor,
    q_BHLK: torch.Tensor,
    before: LinearState,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHL: torch.Tensor | None = None,
    denominator: Denominator | None = None,
    out_dtype: torch.dtype = torch.float32,
    implementation: Implementation = "auto",
    rooms: Rooms | None = None,
) -> torch.Tensor:
    """Attention over everything: `local_sums` and, decayed by the gates since, the state `before` their first token.

    Gated, it ends where nothing of that state is left. `implementation` and `rooms` are as for `linear_attention`.

    Shapes: sums [B, H, L, V + 2], q [B, H, L, K], log_gate [B, H, L] -> [B, H, L, V].
    Raises: ConfigError for an implementation that cannot take this call.
    """
    policy = Denominator() if denominator is None else denominator
    dtype = sums_BHLX.dtype
    # As many values as the state has, of the queries' type: what the kernels are chosen by.
    like_v = q_BHLK[..., :1].expand(*q_BHLK.shape[:3], before.s_BHMV.shape[3])
    choice = choose(implementation, q_BHLK, q_BHLK, like_v, feature_map=feature_map, state=before, sums=dtype)
    if choice.implementation == "triton":
        return _complete_by_kernels(sums_BHLX, q_BHLK, before, feature_map, log_gate_BHL, policy).to(out_dtype)
    if choice.implementation == "native":
        streaming = partial(complete_sums, implementation="streaming")
        return natively_completed(
            sums_BHLX, q_BHLK, before, feature_map, log_gate_BHL, policy, out_dtype, complete=streaming, rooms=rooms
        )
    block = AttentionBlock(feature_map, policy, 1, dtype)
    parameters = () if feature_map is None else feature_map.tensors()
    sz_BHMW = torch.cat([before.s_BHMV, before.z_BHM[..., None]], dim=-1).to(dtype)
    mass_BH = before.mass_BH.to(dtype)
    out_BHLV, _ = scan(
        _Complete(block, len(parameters)),
        block_ranges(sums_BHLX.shape),
        (sums_BHLX, q_BHLK, log_gate_BHL),
        () if log_gate_BHL is None else (torch.zeros_like(mass_BH),),
        (*parameters, sz_BHMW, mass_BH),
        output_shape=(*sums_BHLX.shape[:3], sums_BHLX.shape[3] - 2),
        output_dtype=out_dtype,
    )
    return out_BHLV


def _sums_by_kernels(
    choice: Choice,
    sequence: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    feature_map: FeatureMap | None,
    state: LinearState | None,
    documents: tuple[int, ...],
    rooms: Rooms | None,
) -> tuple[torch.Tensor, LinearState]:
    one = Denominator("one")
    if choice.implementation == "native":
        return native_attention(
            *sequence,
            feature_map=feature_map,
            state=state,
            denominator=one,
            documents=documents,
            replay=attention_again(_sums_by_streaming, feature_map, one, documents),
            undivided=True,
            rooms=rooms,
        )
    # Not at the top: a machine without a GPU need not have triton.
    from dist_attn.ops.linear_attention.triton import triton_linear_attention

    return triton_linear_attention(
        *sequence,
        feature_map=feature_map,
        state=state,
        denominator=one,
        documents=documents,
        differentiable=_sums_by_streaming,
        undivided=True,
    )


def _sums_by_streaming(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    /,
    *,
    feature_map: FeatureMap | None,
    log_gate_BHS: torch.Tensor | None,
    key_scale_BHS: torch.Tensor | None,
    state: LinearState | None,
    denominator: Denominator | None,
    documents: tuple[int, ...] | None,
) -> tuple[torch.Tensor, LinearState]:
    """`local_sums` in the streaming form: what kernels go through where gradients are differentiated again."""
    return local_sums(
        q,
        k,
        v,
        feature_map=feature_map,
        log_gate_BHL=log_gate_BHS,
        key_scale_BHL=key_scale_BHS,
        state=state,
        documents=documents,
        implementation="streaming",
    )


def _complete_by_kernels(
    sums: torch.Tensor,
    q: torch.Tensor,
    before: LinearState,
    feature_map: FeatureMap | None,
    log_gate_BHL: torch.Tensor | None,
    policy: Denominator,
) -> torch.Tensor:
    from dist_attn.ops.linear_attention.triton_full import triton_read_undivided

    num, den = triton_read_undivided(q, before, feature_map=feature_map)
    mass = before.mass_BH[..., None].expand_as(den)
    if log_gate_BHL is not None:
        kept = bounded(log_gate_BHL, sums.dtype).cumsum(-1).exp()
        num, den, mass = num * kept[..., None], den * kept, mass * kept
    return policy.divide(num + sums[..., :-2], den + sums[..., -2], mass + sums[..., -1])


@dataclass(frozen=True)
class _Sums:
    block: AttentionBlock
    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        q, k, v, log_gate, key_scale, starts = sequence
        assert q is not None and k is not None and v is not None
        num_BHTW, mass_BHT, after = self.block.sums(q, k, v, log_gate, key_scale, starts, Carry(*carry), parameters)
        return torch.cat([num_BHTW, mass_BHT[..., None]], dim=-1), after

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        _, k, v, log_gate, key_scale, starts = sequence
        assert k is not None and v is not None
        return self.block.absorb(k, v, log_gate, key_scale, starts, Carry(*carry), parameters)


@dataclass(frozen=True)
class _Complete:
    """Every block reads the same state, so that one is a parameter; the carry is the log of what is left of it."""

    block: AttentionBlock
    num_map_tensors: int
    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        sums, q, log_gate = sequence
        assert sums is not None and q is not None
        sz_BHMW, mass_BH = parameters[self.num_map_tensors :]
        decay_BHT = None
        after = carry
        if log_gate is not None:
            if _vanished(carry[0]):
                return self.block.divide(sums), carry
            decay_BHT = carry[0][..., None] + bounded(log_gate, sums.dtype).cumsum(-1)
            after = (decay_BHT[..., -1],)
        earlier = Carry(sz_BHMW, mass_BH, mass_BH)
        return self.block.complete(sums, q, decay_BHT, earlier, parameters[: self.num_map_tensors]), after

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        log_gate = sequence[2]
        if log_gate is None or _vanished(carry[0]):
            return carry
        return (carry[0] + bounded(log_gate, carry[0].dtype).cumsum(-1)[..., -1],)


def tokens_until_forgotten(log_gate_BHL: torch.Tensor | None, tokens: int) -> int:
    """After how many of so many tokens nothing is left of any head's state before them; all, where that never is.

    `complete_sums` adds nothing behind these. Not asked of a GPU, which would have to wait.
    """
    if log_gate_BHL is None or log_gate_BHL.device.type != "cpu" or torch.compiler.is_compiling():
        return tokens
    if not log_gate_BHL.numel():
        return tokens
    with torch.no_grad():
        most_L = bounded(log_gate_BHL, torch.float32).cumsum(-1).amax(dim=(0, 1))
        # A NaN is no forgetting: other heads go on.
        known_L = ~(most_L < math.log(torch.finfo(torch.float32).tiny))
        last = int(known_L.nonzero().max()) if bool(known_L.any()) else -1
        return min(tokens, last + 2)


def _vanished(log_decay_BH: torch.Tensor) -> bool:
    """Whether every head's decay is below the smallest normal number; not asked of a GPU, which would have to wait."""
    if log_decay_BH.device.type != "cpu" or torch.compiler.is_compiling() or not log_decay_BH.numel():
        return False
    return bool(log_decay_BH.detach().max() < math.log(torch.finfo(log_decay_BH.dtype).tiny))

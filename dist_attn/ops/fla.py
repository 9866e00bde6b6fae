"""Recurrences by the names and in the layout of flash-linear-attention, sharded where `ops` are those of ranks.

    from dist_attn.ops.fla import chunk_gated_delta_rule
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, ops=ShardedSequenceOps(comm, layout))

Tokens come before heads here. Whatever kernels the device has compute them, see `ops.affine_recurrence`. Where values
have more heads than keys, a key head serves several of them.

Shape letters: B batch, T tokens, H key heads, HV value heads, K key size, V values, N sequences packed into one row.
"""

from itertools import pairwise
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.affine import AffineCall, AffineState
from dist_attn.ops.local_sequence_ops import LocalSequenceOps
from dist_attn.ops.sequence_ops import SequenceOps

__all__ = ["Options", "chunk_delta_rule", "chunk_gated_delta_rule", "chunk_gla", "chunk_kda", "chunk_simple_gla"]

Tensor = torch.Tensor


class Options(TypedDict, total=False):
    """The arguments that every operation here takes by name.

    scale                    of queries, K^-0.5 by default.
    initial_state            [B, HV, K, V], or [N, HV, K, V] with `cu_seqlens`; over ranks the one before the first
                             global token.
    output_final_state       the state after the last token is wanted; over ranks after the last global one.
    use_qk_l2norm_in_kernel  queries and keys are divided by their lengths first.
    cu_seqlens               [N + 1], where sequences that are packed into one row begin and end; over ranks the
                             layout's documents say so.
    ops                      of ranks; by default the sequence lies whole in this process.
    """

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    cu_seqlens: Tensor | None
    ops: SequenceOps | None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t.

    Shapes: q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV] -> o [B, T, HV, V] and the state after, or None.
    Raises: ShapeError for tensors that do not fit together, as where heads come before tokens in some; InputError for
        `cu_seqlens` over ranks.
    """
    return _run(q, k, v, g[..., None], beta, options)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` with a decay for each key channel, g [B, T, HV, K]."""
    return _run(q, k, v, g, beta, options)


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` without decay."""
    return _run(q, k, v, torch.zeros_like(beta)[..., None], beta, options)


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Unpack[Options]) -> tuple[Tensor, Tensor | None]:
    """S_t = diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, with g [B, T, HV, K].

    Raises: as `chunk_gated_delta_rule`.
    """
    return _run(q, k, v, g, None, options)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gla` with one decay for a head, g [B, T, HV]."""
    return _run(q, k, v, g[..., None], None, options)


def _run(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    _check(q, k, v, decay, beta)
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (F.normalize(x.float(), dim=-1, eps=1e-6).to(x.dtype) for x in (q, k))
    scale = options.get("scale")
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    tensors = [None if x is None else x.transpose(1, 2) for x in (q, k, v, decay, beta)]
    ops, state = options.get("ops") or LocalSequenceOps(), options.get("initial_state")
    edges, asked = options.get("cu_seqlens"), options.get("output_final_state", False)
    if edges is None:
        out, after = _recur(tensors, state, ops)
    else:
        out, after = _recur_packed(tensors, edges.tolist(), state, ops, asked)
    return out.transpose(1, 2), after if asked else None


def _recur_packed(
    tensors: list[Tensor | None], edges: list[int], state: Tensor | None, ops: SequenceOps, asked: bool
) -> tuple[Tensor, Tensor]:
    """Sequences in one row: together where no state goes in or out, else one by one."""
    q = tensors[0]
    assert q is not None
    rows, tokens = q.shape[0], q.shape[2]
    if not isinstance(ops, LocalSequenceOps):
        raise InputError("cu_seqlens was given over ranks; give their layout the documents, as SequenceLayout has them")
    if rows != 1 or edges[-1] != tokens:
        raise ShapeError(f"cu_seqlens ends at {edges[-1]} for {rows} rows of {tokens} tokens; packed is one row")
    if state is None and not asked:
        starts = tuple(sorted({edge for edge in edges if edge < tokens}))
        return _recur(tensors, None, LocalSequenceOps(starts, ops.implementation))
    made = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        part = [None if x is None else x[:, :, start:stop] for x in tensors]
        made.append(_recur(part, None if state is None else state[number : number + 1], ops))
    return torch.cat([out for out, _ in made], dim=2), torch.cat([after for _, after in made])


def _recur(tensors: list[Tensor | None], state: Tensor | None, ops: SequenceOps) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = tensors
    assert q is not None and k is not None and v is not None and decay is not None
    before = None if state is None else AffineState.from_sums(state)
    out, after = ops.run(AffineCall(q, k, v, decay, beta_BHL=beta, state=before))
    return out, after.s_BHKV


def _check(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> None:
    """Raise ShapeError where tensors do not fit together in this layout."""
    fits = q.dim() == v.dim() == decay.dim() == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2]
    fits = fits and q.shape[2] > 0 and v.shape[2] % q.shape[2] == 0 and decay.shape[:3] == v.shape[:3]
    fits = fits and decay.shape[3] in (1, q.shape[3]) and (beta is None or beta.shape == v.shape[:3])
    if not fits:
        given = {"q": q, "k": k, "v": v, "g": decay[..., 0] if decay.shape[-1:] == (1,) else decay, "beta": beta}
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items() if x is not None)
        raise ShapeError(
            f"{shapes}: needed are q and k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV], or g [B, T, HV, K]; "
            "tokens come before heads, and H divides HV"
        )

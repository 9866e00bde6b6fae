"""Affine recurrences in chunks, in operations that autograd knows to any order: memory flat in the length.

With D_ij the decays of tokens i + 1 to j of a chunk, channel by channel, and S the state before it, tokens read what
earlier ones have written, u_t = b_t^T S_{t-1}, so that for all of a chunk at once

    (1 - P_ba) U = B S + P_bk V          P_xy strictly lower: sum_c x_t D_it y_i, for b without the decay of t itself
    O = Q S + P_qa U + P_qk V            Q, B: decayed from the chunk's start
    S <- D S + A^T U + K^T V             A, K: decayed to the chunk's end.

U is affine in S, so each chunk is one map of the state, and all but the states from chunk to chunk is computed side by
side. Of a delta rule a = -beta k and the write is beta k v^T: with the values W = V - U that is (1 + P_bk) W = V - B S,
and keys with W are all that is written.

Pairs of tokens in two halves of a stretch are products of rows decayed from the middle and of columns decayed to the
middle; halves are halved again. No sum of log decays that is exponentiated reaches behind a pair, so none is positive
where decays are below 1, none is a difference, and -inf, a closed gate, gives 0.

Shape letters: B batch, H heads, T tokens of a block, K key size, V values, G decays of a head; n chunks of C tokens, r
kinds of rows, c kinds of columns, m stretches of s tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.affine.call import AffineCall
from dist_attn.ops.affine.state import AffineState
from dist_attn.ops.documents import chunk_blocks, start_flags
from dist_attn.ops.scan import scan

CHUNK_TOKENS = 64
BLOCK_CHUNKS = {"cpu": 8, "cuda": 128}  # a GPU waits for launches, not for its cache

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


def stream_recurrence(call: AffineCall) -> tuple[torch.Tensor, AffineState]:
    """`affine_recurrence` or `gated_delta_rule` of a call that is checked."""
    dtype = call.sums_dtype()
    out_BHLV, s_BHKV = _scanned(call, call.q_BHLK, dtype, call.first_sums(dtype))
    return out_BHLV, AffineState(s_BHKV)


def stream_absorb(call: AffineCall, dtype: torch.dtype) -> AffineState:
    """The state that the call's keys leave and their effect on a state before them; queries and state are ignored."""
    return absorbed(call, dtype, stream_sums)


def stream_sums(call: AffineCall, first: torch.Tensor) -> torch.Tensor:
    """The state after the call's last token, from this one; its queries and state count for nothing."""
    return _scanned(call, None, first.dtype, first)[1]


def absorbed(
    call: AffineCall, dtype: torch.dtype, sums_after: Callable[[AffineCall, torch.Tensor], torch.Tensor]
) -> AffineState:
    """`stream_absorb` by any walk over the keys: `sums_after` of a call and of the state before it."""
    if call.documents:
        last = call.part(call.documents[-1], call.tokens)
        return AffineState(sums_after(last, torch.zeros_like(last.first_sums(dtype))), *_nothing_left(call, dtype))
    if not call.erases:
        s_BHKV = sums_after(call, torch.zeros_like(call.first_sums(dtype)))
        return AffineState(s_BHKV, call.log_decay_BHLG.to(dtype).sum(2))
    # Values that write nothing, from the identity: what becomes of it is A.
    batch, heads, size, values = call.state_shape
    eye_KK = torch.eye(size, dtype=dtype, device=call.v_BHLV.device)
    first = F.pad(eye_KK, (values, 0)).expand(batch, heads, size, values + size)
    q, k, v, *rest = call.sequence
    assert v is not None
    wide = call.with_sequence((q, k, F.pad(v, (0, size)), *rest))
    s_BHKV, a_BHKK = sums_after(wide, first).split((values, size), dim=-1)
    return AffineState(s_BHKV, change_BHKK=a_BHKK - eye_KK)


def _nothing_left(call: AffineCall, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The transition of a stretch in which a document starts."""
    batch, heads, size, _ = call.state_shape
    device = call.v_BHLV.device
    if call.erases:
        return None, -torch.eye(size, dtype=dtype, device=device).expand(batch, heads, size, size)
    return torch.full((batch, heads, call.log_decay_BHLG.shape[3]), -torch.inf, dtype=dtype, device=device), None


def _scanned(
    call: AffineCall, q_BHLK: torch.Tensor | None, dtype: torch.dtype, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, if there are queries, and the state after the last token."""
    device = call.v_BHLV.device
    starts_11L = start_flags(call.documents, call.tokens, device)[None, None] if call.documents else None
    sequence = (q_BHLK, *call.sequence[1:], starts_11L)
    body = _Block(call.read == "before", dtype, q_BHLK is not None)
    parameters = () if call.bonus_HK is None or q_BHLK is None else (call.bonus_HK,)
    out, (s_BHKV,) = scan(
        body,
        chunk_blocks(call.tokens, CHUNK_TOKENS, BLOCK_CHUNKS.get(device.type, 8) * CHUNK_TOKENS, call.documents),
        sequence,
        (first,),
        parameters,
        output_shape=tuple(call.v_BHLV.shape),
        output_dtype=call.v_BHLV.dtype,
    )
    return out, s_BHKV


class _Written(NamedTuple):
    """One kind of columns in every chunk, and the values with which it is written: fixed + of_state S.

    Columns are decayed to the chunk's end; `pairs` are those of queries with them.
    """

    columns_CK: torch.Tensor
    fixed_CV: torch.Tensor
    of_state_CK: torch.Tensor | None
    pairs_CC: torch.Tensor | None


@dataclass(frozen=True)
class _Block:
    """A block of whole chunks, or one shorter chunk at the end of a document: outputs, and the state after it."""

    reads_before: bool
    dtype: torch.dtype
    has_output: bool

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        return self._states(self._written((None, *sequence[1:]), ()), sequence, carry)[1]

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        written = self._written(sequence, parameters)
        before_nKV, after = self._states(written, sequence, carry)
        if not self.has_output:
            return None, after
        q_nCK, decay_nCG = _chunks(sequence[0], self.dtype), _chunks(sequence[3], self.dtype)
        assert q_nCK is not None and decay_nCG is not None
        out_nCV = (q_nCK * _from_start(decay_nCG, self.reads_before).exp()) @ before_nKV
        for one in written:
            assert one.pairs_CC is not None  # there are queries
            values = one.fixed_CV if one.of_state_CK is None else one.fixed_CV + one.of_state_CK @ before_nKV
            out_nCV = out_nCV + one.pairs_CC @ values
        assert sequence[2] is not None
        return out_nCV.flatten(2, 3)[:, :, : sequence[2].shape[2]], after

    def _written(self, sequence: _Optional, parameters: _Tensors) -> list[_Written]:
        q, k, v, decay, a, b, beta = (_chunks(t, self.dtype) for t in sequence[:7])
        assert k is not None and v is not None and decay is not None
        if beta is not None:
            b, k = k * decay.exp(), k * beta
        rows = [(b, True), (q, self.reads_before)]
        columns = [k] if a is None else [k, a]
        there = [(x, exclusive) for x, exclusive in rows if x is not None]
        pairs = _decayed_pairs(there, columns, decay) if there else None
        of_b = None if b is None or pairs is None else [pairs[..., 0, i, :, :] for i in range(len(columns))]
        of_q: list[torch.Tensor | None] = [None for _ in columns]
        if q is not None and pairs is not None:
            of_q = [self._with_diagonal(pairs[..., -1, i, :, :], q, x, parameters) for i, x in enumerate(columns)]
            if self.reads_before:  # a bonus is of what a token writes, not of what it takes
                of_q[1:] = [pairs[..., -1, i, :, :] for i in range(1, len(columns))]
        to_end = _to_end(decay).exp()
        if b is None or of_b is None:
            return [_Written(k * to_end, v, None, of_q[0])]
        b = b * _from_start(decay, exclusive=True).exp()
        if a is None:
            fixed, of_state = _solved(of_b[0], v, -b)
            return [_Written(k * to_end, fixed, of_state, of_q[0])]
        fixed, of_state = _solved(-of_b[1], of_b[0] @ v, b)
        return [_Written(a * to_end, fixed, of_state, of_q[1]), _Written(k * to_end, v, None, of_q[0])]

    def _with_diagonal(
        self, pairs_CC: torch.Tensor, q_CK: torch.Tensor, x_CK: torch.Tensor, parameters: _Tensors
    ) -> torch.Tensor:
        """Pairs of queries with columns, and of each token with itself where its query sees it."""
        if self.reads_before:
            if not parameters:
                return pairs_CC
            q_CK = q_CK * parameters[0].to(self.dtype)[:, None, None]
        return pairs_CC + torch.diag_embed((q_CK * x_CK).sum(-1))

    def _states(self, written: list[_Written], sequence: _Optional, carry: _Tensors) -> tuple[torch.Tensor, _Tensors]:
        """The state before each chunk, [B, H, n, K, V], and after the last."""
        (state_KV,), starts_11T = carry, sequence[7]
        if starts_11T is not None:  # documents start at the first token of a block, or not in it
            state_KV = torch.where(starts_11T[0, 0, 0], 0.0, state_KV)
        decay = _chunks(sequence[3], self.dtype)
        assert decay is not None
        kept_nK1 = decay.sum(3).exp()[..., None]
        added_nKV = torch.stack([one.columns_CK.mT @ one.fixed_CV for one in written]).sum(0)
        maps = [one.columns_CK.mT @ one.of_state_CK for one in written if one.of_state_CK is not None]
        states = [state_KV]
        for n in range(added_nKV.shape[2]):
            kept = kept_nK1[:, :, n] * states[-1]
            moved = maps[0][:, :, n] @ states[-1] if maps else 0.0
            states.append(kept + moved + added_nKV[:, :, n])
        return torch.stack(states[:-1], dim=2), (states[-1],)


def _chunks(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[B, H, n, C, X] of [B, H, T, X], or of [B, H, T] with X = 1; a shorter chunk is filled up to a power of two."""
    if x is None:
        return None
    x = (x if x.dim() == 4 else x[..., None]).to(dtype)
    tokens = x.shape[2]
    if tokens >= CHUNK_TOKENS:
        return x.reshape(*x.shape[:2], -1, CHUNK_TOKENS, x.shape[3])
    return F.pad(x, (0, 0, 0, (1 << (tokens - 1).bit_length()) - tokens))[:, :, None]


def _from_start(decay_nCG: torch.Tensor, exclusive: bool) -> torch.Tensor:
    """Log decays from the chunk's start to each token, its own among them unless `exclusive`."""
    sums = decay_nCG.cumsum(-2)
    return F.pad(sums[..., :-1, :], (0, 0, 1, 0)) if exclusive else sums


def _to_end(decay_nCG: torch.Tensor) -> torch.Tensor:
    """Log decays after each token to the chunk's end."""
    return F.pad(decay_nCG[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


def _decayed_pairs(
    rows: list[tuple[torch.Tensor, bool]], columns: list[torch.Tensor], decay_nCG: torch.Tensor
) -> torch.Tensor:
    """The products of row t and column i for tokens i < t, decayed in between; 0 elsewhere. [.., n, r, c, C, C].

    Rows that are exclusive leave out the decay of t itself.
    """
    size = decay_nCG.shape[-2]
    shape = (*decay_nCG.shape[:-2], len(rows), len(columns), size, 1, 1)
    found = decay_nCG.new_zeros(shape)
    columns_ncCK = torch.stack(columns, dim=-3)
    half = 1
    while half < size:
        halves = (size // (2 * half), 2, half)
        first, second = decay_nCG.unflatten(-2, halves).unbind(-3)
        left = [x.unflatten(-2, halves)[..., 1, :, :] * _from_start(second, exclusive).exp() for x, exclusive in rows]
        right = columns_ncCK.unflatten(-2, halves)[..., 0, :, :] * _to_end(first).exp()[..., None, :, :, :]
        cross = torch.stack(left, dim=-4)[..., :, None, :, :, :] @ right[..., None, :, :, :, :].mT
        upper, lower = found.unflatten(-3, (-1, 2)).unbind(-3)
        found = torch.cat([F.pad(upper, (0, half)), torch.cat([cross, lower], dim=-1)], dim=-2)
        half *= 2
    return found[..., 0, :, :]


def _solved(
    lower_CC: torch.Tensor, fixed_CV: torch.Tensor, of_state_CK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(1 + lower)^-1 of both, for a strictly lower triangle."""
    both = torch.cat([fixed_CV, of_state_CK], dim=-1)
    # `unitriangular` takes the diagonal as ones, whatever the matrix holds there.
    solved = torch.linalg.solve_triangular(lower_CC, both, upper=False, unitriangular=True)
    parts = solved.split((fixed_CV.shape[-1], of_state_CK.shape[-1]), dim=-1)
    return parts[0], parts[1]

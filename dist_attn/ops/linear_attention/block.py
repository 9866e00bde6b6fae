"""The maths of one block: n chunks of C tokens, all heads at once, state in and state out.

Intra-chunk attention is a masked C x C product, inter-chunk attention a read of the running state
(RFA Eq. 6 and 7 in chunked form). A ones column beside v makes z and the denominator part of the same
matrix products. Gated: with c_t the cumulative log gate inside the chunk, the weight of key i at query t is
exp(c_t - c_i) * key_scale_i, formed as one exponent <= 0 and masked before exp, so it cannot overflow.

Where documents start inside a block, a pair of tokens of two documents weighs exactly 0, cumulative sums restart, and
the state is replaced, not multiplied by 0: no number of one document enters the arithmetic of another one's tokens.

Shape letters: B batch, H heads, T tokens of a block, K head size, V values, M features; G = B H, n chunks of C tokens,
W = V + 1 (numerators beside the denominator), X = V + 2 (and the mass beside both).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap

CLOSED = {torch.float32: -104.0, torch.float64: -746.0}  # exp gives 0 from here on


class BlockCarry(NamedTuple):
    """The values that go from block to block: [S | z] as one [B, H, M, V + 1], the mass and the log decay [B, H]."""

    sz_BHMW: torch.Tensor
    mass_BH: torch.Tensor
    log_decay_BH: torch.Tensor


class BlockTokens(NamedTuple):
    """The tensors of a block along its tokens; without queries its keys are only absorbed."""

    q_BHTK: torch.Tensor | None
    k_BHTK: torch.Tensor
    v_BHTV: torch.Tensor
    log_gate_BHT: torch.Tensor | None
    key_scale_BHT: torch.Tensor | None
    starts_11T: torch.Tensor | None  # at which tokens documents start; None: at none of them

    @staticmethod
    def of(sequence: tuple[torch.Tensor | None, ...]) -> "BlockTokens":
        """The slices that a scan was given of a call's tensors."""
        return BlockTokens(*sequence)  # type: ignore[arg-type]  # keys and values are always there


class _Segments(NamedTuple):
    """The documents in the chunks of a block, as masks."""

    same_nCC: torch.Tensor  # whether query t and key i are of one document
    first_nC: torch.Tensor  # whether a token is of the document that the state before the chunk is of
    last_nC: torch.Tensor  # whether it is of the one that the state after the chunk is of
    fresh_n: torch.Tensor  # whether a document starts in the chunk

    @staticmethod
    def of(starts_nC: torch.Tensor) -> "_Segments":
        number_nC = starts_nC.cumsum(-1)
        last_n1 = number_nC[:, -1:]
        same_nCC = number_nC[:, :, None] == number_nC[:, None, :]
        return _Segments(same_nCC, number_nC == 0, number_nC == last_n1, last_n1[:, 0] > 0)


class _Chunked(NamedTuple):
    """A block's keys, split in chunks (G = B * H, n chunks of C tokens, W = V + 1)."""

    phi_k_GnCM: torch.Tensor
    v1_GnCW: torch.Tensor  # [v, 1] * key_scale
    scale_GnC: torch.Tensor | None
    decay_GnC: torch.Tensor | None  # cumulative log gate inside the chunk and document, c_t
    totals_GnMW: torch.Tensor  # what each chunk adds to the state
    within_GnC: torch.Tensor | None  # how much of each key is left after the chunk; None: all of it (G may be 1)
    segments: _Segments | None


@dataclass(frozen=True)
class AttentionBlock:
    """Causal attention over one block as a pure function of (tokens, carry, feature-map tensors).

    `at_once` scans a block's chunks by few large operations in place of a few for each chunk.
    """

    feature_map: FeatureMap | None
    denominator: Denominator
    chunk: int
    dtype: torch.dtype
    at_once: bool = False

    def attend(
        self, tokens: BlockTokens, carry: BlockCarry, map_tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, BlockCarry]:
        """Outputs [B, H, T, V] of the block's queries and the carry after it. T is a multiple of `chunk` or below."""
        num_BHTW, mass_BHT, after = self.sums(tokens, carry, map_tensors)
        return self.denominator.divide(num_BHTW[..., :-1], num_BHTW[..., -1], mass_BHT), after

    def sums(
        self, tokens: BlockTokens, carry: BlockCarry, map_tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, BlockCarry]:
        """Sum up numerators beside denominators, [B, H, T, V + 1], which `attend` divides, and masses [B, H, T].

        Returns them and the carry after the block.
        """
        assert tokens.q_BHTK is not None  # only keys that are absorbed come without queries
        batch, heads, length, values = tokens.v_BHTV.shape
        size = min(self.chunk, length)
        # The last size is spelt out: an empty batch has no elements to tell it by.
        phi_q_BHTM = self.features(tokens.q_BHTK, map_tensors)
        phi_q_GnCM = phi_q_BHTM.reshape(batch * heads, length // size, size, phi_q_BHTM.shape[-1])
        keys = self._chunked(tokens, map_tensors, size)
        before_GnMW, mass_before_Gn, after = self._scan(keys, carry)

        weights_GnCC = phi_q_GnCM @ keys.phi_k_GnCM.transpose(-1, -2)
        inter_GnCW = phi_q_GnCM @ before_GnMW
        if mass_before_Gn is None:
            num_GnCW = weights_GnCC.tril() @ keys.v1_GnCW + inter_GnCW
            steps_GnC = self._steps(keys, batch * heads, length).reshape(-1, length // size, size)
            mass_GnC = carry.mass_BH.reshape(-1, 1, 1) + steps_GnC
        else:
            pairs_GnCC, into_GnC = self._pairs(keys)
            num_GnCW = (weights_GnCC * pairs_GnCC) @ keys.v1_GnCW + into_GnC[..., None] * inter_GnCW
            scale_GnC = keys.scale_GnC
            own_GnC = pairs_GnCC.sum(-1) if scale_GnC is None else (pairs_GnCC @ scale_GnC[..., None])[..., 0]
            mass_GnC = into_GnC * mass_before_Gn[..., None] + own_GnC
        return num_GnCW.reshape(batch, heads, length, values + 1), mass_GnC.reshape(batch, heads, length), after

    def complete(
        self,
        sums_BHTX: torch.Tensor,
        q_BHTK: torch.Tensor,
        decay_BHT: torch.Tensor | None,
        earlier: BlockCarry,
        map_tensors: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Outputs of queries whose `sums` and mass were taken from nothing, with `earlier` before them added.

        `decay` is the log of what has become of `earlier` at each query.
        """
        num_BHTW, mass_BHT = self.features(q_BHTK, map_tensors) @ earlier.sz_BHMW, earlier.mass_BH[..., None]
        if decay_BHT is not None:
            kept_BHT = decay_BHT.exp()
            num_BHTW, mass_BHT = num_BHTW * kept_BHT[..., None], mass_BHT * kept_BHT
        num_BHTW = num_BHTW + sums_BHTX[..., :-1]
        return self.denominator.divide(num_BHTW[..., :-1], num_BHTW[..., -1], mass_BHT + sums_BHTX[..., -1])

    def divide(self, sums_BHTX: torch.Tensor) -> torch.Tensor:
        """Outputs of queries that nothing came before."""
        return self.denominator.divide(sums_BHTX[..., :-2], sums_BHTX[..., -2], sums_BHTX[..., -1])

    def absorb(self, tokens: BlockTokens, carry: BlockCarry, map_tensors: tuple[torch.Tensor, ...]) -> BlockCarry:
        """The carry after the block, without its outputs."""
        keys = self._chunked(tokens, map_tensors, min(self.chunk, tokens.v_BHTV.shape[2]))
        return self._scan(keys, carry)[2]

    def read(self, q_BHTK: torch.Tensor, carry: BlockCarry, map_tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Outputs of queries that all see exactly `carry` (cross and full attention, RFA Algorithm 2)."""
        num_BHTW = self.features(q_BHTK, map_tensors) @ carry.sz_BHMW
        return self.denominator.divide(num_BHTW[..., :-1], num_BHTW[..., -1], carry.mass_BH[..., None])

    def features(self, x_BHTK: torch.Tensor, map_tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """phi of queries or keys, in the precision of the sums; what they are already, without a feature map."""
        x_BHTK = x_BHTK.to(self.dtype)
        return x_BHTK if self.feature_map is None else self.feature_map.with_tensors(*map_tensors)(x_BHTK)

    def _chunked(self, tokens: BlockTokens, map_tensors: tuple[torch.Tensor, ...], size: int) -> _Chunked:
        _, k_BHTK, v_BHTV, log_gate_BHT, key_scale_BHT, starts_11T = tokens
        batch, heads, length, values = v_BHTV.shape
        groups, chunks = batch * heads, length // size
        phi_k_BHTM = self.features(k_BHTK, map_tensors)
        phi_k_GnCM = phi_k_BHTM.reshape(groups, chunks, size, phi_k_BHTM.shape[-1])
        v1_GnCW = F.pad(v_BHTV.to(self.dtype), (0, 1), value=1.0).reshape(groups, chunks, size, values + 1)
        segments = None if starts_11T is None else _Segments.of(starts_11T.reshape(chunks, size))
        scale_GnC = decay_GnC = within_GnC = None
        if key_scale_BHT is not None:
            scale_GnC = key_scale_BHT.to(self.dtype).reshape(groups, chunks, size)
            v1_GnCW = v1_GnCW * scale_GnC[..., None]
        if log_gate_BHT is not None:
            decay_GnC = _cumulative(bounded(log_gate_BHT, self.dtype).reshape(groups, chunks, size), segments)
            remaining_GnC = decay_GnC[..., -1:] - decay_GnC
            if segments is not None:
                remaining_GnC = remaining_GnC.masked_fill(~segments.last_nC, float("-inf"))
            within_GnC = remaining_GnC.exp()
        elif segments is not None:
            within_GnC = segments.last_nC.to(self.dtype)[None]
        kept_GnCW = v1_GnCW if within_GnC is None else v1_GnCW * within_GnC[..., None]
        totals_GnMW = phi_k_GnCM.transpose(-1, -2) @ kept_GnCW
        return _Chunked(phi_k_GnCM, v1_GnCW, scale_GnC, decay_GnC, totals_GnMW, within_GnC, segments)

    def _scan(self, keys: _Chunked, carry: BlockCarry) -> tuple[torch.Tensor, torch.Tensor | None, BlockCarry]:
        """The state [G, n, M, W] and the mass [G, n] before each chunk, and the carry after the last one.

        Without gates and documents the mass is a cumulative sum and is not given.
        """
        if self.at_once and keys.segments is None:
            return self._scan_at_once(keys, carry)
        state_GMW = carry.sz_BHMW.reshape(-1, *carry.sz_BHMW.shape[2:])
        mass_G = carry.mass_BH.reshape(-1)
        log_decay_G = carry.log_decay_BH.reshape(-1)
        groups, _, size = keys.v1_GnCW.shape[:3]
        chunks = keys.totals_GnMW.shape[1]
        before, mass_before = [], []
        # unbind, not [:, n]: the backward pass of an index fills a zero tensor of full size for every chunk.
        totals = keys.totals_GnMW.unbind(1)
        if keys.within_GnC is None:
            for total_GMW in totals:
                before.append(state_GMW)
                state_GMW = state_GMW + total_GMW
            mass_G = mass_G + self._steps(keys, groups, chunks * size)[..., -1]
        else:
            within_GnC = keys.within_GnC if keys.scale_GnC is None else keys.within_GnC * keys.scale_GnC
            ends = [None] * chunks if keys.decay_GnC is None else keys.decay_GnC[..., -1].unbind(1)
            fresh = [None] * chunks if keys.segments is None else keys.segments.fresh_n.unbind(0)
            for total_GMW, added_G, end_G, new in zip(totals, within_GnC.sum(-1).unbind(1), ends, fresh, strict=True):
                before.append(state_GMW)
                mass_before.append(mass_G)
                if new is not None:
                    # Dropped, not multiplied by 0: what went wrong in one document must not reach the next.
                    state_GMW, mass_G, log_decay_G = (t.masked_fill(new, 0.0) for t in (state_GMW, mass_G, log_decay_G))
                if end_G is None:
                    state_GMW, mass_G = state_GMW + total_GMW, mass_G + added_G
                else:
                    gain_G = end_G.exp()
                    state_GMW = torch.addcmul(total_GMW, state_GMW, gain_G[:, None, None])
                    mass_G, log_decay_G = gain_G * mass_G + added_G, log_decay_G + end_G
        after = BlockCarry(
            state_GMW.reshape(carry.sz_BHMW.shape),
            mass_G.reshape(carry.mass_BH.shape),
            log_decay_G.reshape(carry.log_decay_BH.shape),
        )
        return torch.stack(before, dim=1), torch.stack(mass_before, dim=1) if mass_before else None, after

    def _scan_at_once(self, keys: _Chunked, carry: BlockCarry) -> tuple[torch.Tensor, torch.Tensor | None, BlockCarry]:
        """`_scan` without a loop. Not with documents: a weight of 0 does not keep out what is not finite.

        Cost: with gates n^2 M W for each head, n the chunks of the block.
        """
        groups, chunks, size, _ = keys.v1_GnCW.shape
        features, columns = carry.sz_BHMW.shape[2:]
        added_GNMW = torch.cat([carry.sz_BHMW.reshape(-1, 1, features, columns), keys.totals_GnMW], dim=1)
        mass_G, log_decay_BH, mass_before = carry.mass_BH.reshape(-1), carry.log_decay_BH, None
        if keys.decay_GnC is None:
            states_GNMW = added_GNMW.cumsum(1)
            mass_G = mass_G + self._steps(keys, groups, chunks * size)[..., -1]
        else:
            assert keys.within_GnC is not None  # where there are gates
            within_GnC = keys.within_GnC if keys.scale_GnC is None else keys.within_GnC * keys.scale_GnC
            end_Gn = keys.decay_GnC[..., -1]
            # The share left before chunk j of what chunk i - 1 has added: sums of the gates between, and no differences
            # of sums from the first one, which lose their digits.
            later_nn = torch.ones(chunks, chunks, dtype=torch.bool, device=end_Gn.device).triu()
            log_left_GnN = F.pad(end_Gn[:, None].where(later_nn, 0.0).cumsum(-1), (1, 0))
            log_left_GNN = F.pad(log_left_GnN, (0, 0, 0, 1))
            seen_NN = torch.ones(chunks + 1, chunks + 1, dtype=torch.bool, device=end_Gn.device).triu()
            left_GNN = log_left_GNN.masked_fill(~seen_NN, float("-inf")).exp().transpose(1, 2)
            states_GNMW = (left_GNN @ added_GNMW.flatten(2)).unflatten(2, (features, columns))
            masses_GN1 = left_GNN @ torch.cat([mass_G[:, None], within_GnC.sum(-1)], dim=1)[..., None]
            mass_before, mass_G = masses_GN1[:, :-1, 0], masses_GN1[:, -1, 0]
            log_decay_BH = log_decay_BH + end_Gn.sum(-1).reshape(log_decay_BH.shape)
        after = BlockCarry(
            states_GNMW[:, -1].reshape(carry.sz_BHMW.shape), mass_G.reshape(carry.mass_BH.shape), log_decay_BH
        )
        return states_GNMW[:, :-1], mass_before, after

    def _steps(self, keys: _Chunked, groups: int, tokens: int) -> torch.Tensor:
        """Cumulative key scale over the block, [G or 1, T]: 1, 2, 3, ... when there is none."""
        if keys.scale_GnC is None:
            return torch.arange(1, tokens + 1, dtype=self.dtype, device=keys.v1_GnCW.device)[None]
        return keys.scale_GnC.reshape(groups, tokens).cumsum(-1)

    def _pairs(self, keys: _Chunked) -> tuple[torch.Tensor, torch.Tensor]:
        """The shares left of key i at query t of its chunk, [G or 1, n, C, C], and of the state before, [G or 1, n, C].

        Both are 0 across the start of a document, the first also for keys after the query.
        """
        size = keys.v1_GnCW.shape[2]
        seen_CC = torch.ones(size, size, dtype=torch.bool, device=keys.v1_GnCW.device).tril()
        seen_nCC = seen_CC if keys.segments is None else seen_CC & keys.segments.same_nCC
        if keys.decay_GnC is None:
            assert keys.segments is not None  # only called with gates or documents
            return seen_nCC.to(self.dtype)[None], keys.segments.first_nC.to(self.dtype)[None]
        decay_GnCC = keys.decay_GnC[..., :, None] - keys.decay_GnC[..., None, :]
        into_GnC = keys.decay_GnC
        if keys.segments is not None:
            into_GnC = into_GnC.masked_fill(~keys.segments.first_nC, float("-inf"))
        return decay_GnCC.masked_fill(~seen_nCC, float("-inf")).exp(), into_GnC.exp()


def bounded(log_gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Log gates with -inf, a closed gate, and all others whose exp is 0 raised to where it is 0 just so.

    Differences of their sums would be inf - inf, and far below have no digits left for the gates that follow.
    """
    return log_gate.to(dtype).clamp_min(CLOSED[dtype])


def _cumulative(gate_GnC: torch.Tensor, segments: _Segments | None) -> torch.Tensor:
    """The cumulative log gate inside each chunk and document.

    It restarts in every chunk: over a whole long sequence its differences lose all digits.
    """
    if segments is None:
        return gate_GnC.cumsum(-1)
    # A sum with weights 0 and 1, and no difference of two sums, which would round by the gates of other documents.
    return (segments.same_nCC.tril().to(gate_GnC.dtype) @ gate_GnC[..., None])[..., 0]

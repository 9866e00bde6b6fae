"""The maths of one cache-sized block: n chunks of C tokens, all heads at once, state in and state out.

Intra-chunk attention is a masked C x C product, inter-chunk attention a read of the running state
(RFA Eq. 6 and 7 in chunked form). A ones column beside v makes z and the denominator part of the same
matrix products. Gated: with c_t the cumulative log gate inside the chunk, the weight of key i at query t is
exp(c_t - c_i) * key_scale_i, formed as one exponent <= 0 and masked before exp, so it cannot overflow.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap

__all__ = ["AttentionBlock", "Carry"]


class Carry(NamedTuple):
    """What travels from block to block: [S | z] as one [B, H, M, V + 1], the mass and the log decay [B, H]."""

    sz_BHMW: torch.Tensor
    mass_BH: torch.Tensor
    log_decay_BH: torch.Tensor


class _Chunked(NamedTuple):
    """A block's keys, split in chunks (G = B * H, n chunks of C tokens, W = V + 1)."""

    phi_k_GnCM: torch.Tensor
    v1_GnCW: torch.Tensor  # [v, 1] * key_scale
    scale_GnC: torch.Tensor | None
    decay_GnC: torch.Tensor | None  # cumulative log gate inside the chunk, c_t
    totals_GnMW: torch.Tensor  # what each chunk adds to the state


@dataclass(frozen=True)
class AttentionBlock:
    """Causal attention over one block as a pure function of (sequence slices, carry, feature-map tensors)."""

    feature_map: FeatureMap | None
    denominator: Denominator
    chunk: int
    dtype: torch.dtype

    def attend(
        self,
        q_BHTK: torch.Tensor,
        k_BHTK: torch.Tensor,
        v_BHTV: torch.Tensor,
        log_gate_BHT: torch.Tensor | None,
        key_scale_BHT: torch.Tensor | None,
        carry: Carry,
        map_tensors: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, Carry]:
        """Outputs [B, H, T, V] of the block's queries and the carry after it. T is a multiple of `chunk` or below."""
        batch, heads, tokens, values = v_BHTV.shape
        size = min(self.chunk, tokens)
        # The last size is spelt out: an empty batch has no elements to tell it by.
        phi_q_BHTM = self._features(q_BHTK, map_tensors)
        phi_q_GnCM = phi_q_BHTM.reshape(batch * heads, tokens // size, size, phi_q_BHTM.shape[-1])
        keys = self._chunked(k_BHTK, v_BHTV, log_gate_BHT, key_scale_BHT, map_tensors, size)
        before_GnMW, after = self._scan(keys, carry)

        weights_GnCC = phi_q_GnCM @ keys.phi_k_GnCM.transpose(-1, -2)
        inter_GnCW = phi_q_GnCM @ before_GnMW
        mass_G1 = carry.mass_BH.reshape(-1, 1, 1)
        if keys.decay_GnC is None:
            weights_GnCC = weights_GnCC.tril()
            num_GnCW = weights_GnCC @ keys.v1_GnCW + inter_GnCW
            mass_GnC = mass_G1 + self._steps(keys, batch * heads, tokens).reshape(-1, tokens // size, size)
        else:
            decay_GnCC = _pair_decay(keys.decay_GnC)
            num_GnCW = (weights_GnCC * decay_GnCC) @ keys.v1_GnCW + keys.decay_GnC.exp()[..., None] * inter_GnCW
            mass_GnC = self._gated_mass(keys, decay_GnCC, carry.mass_BH.reshape(-1))
        num_BHTV, den_BHT1 = num_GnCW.reshape(batch, heads, tokens, values + 1).split((values, 1), dim=-1)
        return self.denominator.divide(num_BHTV, den_BHT1[..., 0], mass_GnC.reshape(batch, heads, tokens)), after

    def absorb(
        self,
        k_BHTK: torch.Tensor,
        v_BHTV: torch.Tensor,
        log_gate_BHT: torch.Tensor | None,
        key_scale_BHT: torch.Tensor | None,
        carry: Carry,
        map_tensors: tuple[torch.Tensor, ...],
    ) -> Carry:
        """The carry after the block, without its outputs."""
        size = min(self.chunk, v_BHTV.shape[2])
        return self._scan(self._chunked(k_BHTK, v_BHTV, log_gate_BHT, key_scale_BHT, map_tensors, size), carry)[1]

    def read(self, q_BHTK: torch.Tensor, carry: Carry, map_tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Outputs of queries that all see exactly `carry` (cross and full attention, RFA Algorithm 2)."""
        num_BHTW = self._features(q_BHTK, map_tensors) @ carry.sz_BHMW
        return self.denominator.divide(num_BHTW[..., :-1], num_BHTW[..., -1], carry.mass_BH[..., None])

    def _features(self, x_BHTK: torch.Tensor, map_tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x_BHTK = x_BHTK.to(self.dtype)
        return x_BHTK if self.feature_map is None else self.feature_map.with_tensors(*map_tensors)(x_BHTK)

    def _chunked(
        self,
        k_BHTK: torch.Tensor,
        v_BHTV: torch.Tensor,
        log_gate_BHT: torch.Tensor | None,
        key_scale_BHT: torch.Tensor | None,
        map_tensors: tuple[torch.Tensor, ...],
        size: int,
    ) -> _Chunked:
        batch, heads, tokens, values = v_BHTV.shape
        groups, chunks = batch * heads, tokens // size
        phi_k_BHTM = self._features(k_BHTK, map_tensors)
        phi_k_GnCM = phi_k_BHTM.reshape(groups, chunks, size, phi_k_BHTM.shape[-1])
        v1_GnCW = F.pad(v_BHTV.to(self.dtype), (0, 1), value=1.0).reshape(groups, chunks, size, values + 1)
        scale_GnC = decay_GnC = None
        if key_scale_BHT is not None:
            scale_GnC = key_scale_BHT.to(self.dtype).reshape(groups, chunks, size)
            v1_GnCW = v1_GnCW * scale_GnC[..., None]
        kept_GnCW = v1_GnCW
        if log_gate_BHT is not None:
            # The cumulative sum restarts in every chunk: over a whole long sequence its differences lose all digits.
            decay_GnC = log_gate_BHT.to(self.dtype).reshape(groups, chunks, size).cumsum(-1)
            kept_GnCW = v1_GnCW * (decay_GnC[..., -1:] - decay_GnC).exp()[..., None]
        return _Chunked(phi_k_GnCM, v1_GnCW, scale_GnC, decay_GnC, phi_k_GnCM.transpose(-1, -2) @ kept_GnCW)

    def _scan(self, keys: _Chunked, carry: Carry) -> tuple[torch.Tensor, Carry]:
        """The state before each chunk, [G, n, M, W], and the carry after the last one."""
        state_GMW = carry.sz_BHMW.reshape(-1, *carry.sz_BHMW.shape[2:])
        mass_G = carry.mass_BH.reshape(-1)
        log_decay_G = carry.log_decay_BH.reshape(-1)
        groups, _, size = keys.v1_GnCW.shape[:3]
        chunks = keys.totals_GnMW.shape[1]
        before = []
        # unbind, not [:, n]: the backward pass of an index fills a zero tensor of full size for every chunk.
        if keys.decay_GnC is None:
            for total_GMW in keys.totals_GnMW.unbind(1):
                before.append(state_GMW)
                state_GMW = state_GMW + total_GMW
            mass_G = mass_G + self._steps(keys, groups, chunks * size)[..., -1]
        else:
            gain_Gn = keys.decay_GnC[..., -1].exp()
            within_GnC = (keys.decay_GnC[..., -1:] - keys.decay_GnC).exp()
            added_Gn = (within_GnC if keys.scale_GnC is None else within_GnC * keys.scale_GnC).sum(-1)
            per_chunk = zip(keys.totals_GnMW.unbind(1), gain_Gn.unbind(1), added_Gn.unbind(1), strict=True)
            for total_GMW, gain_G, added_G in per_chunk:
                before.append(state_GMW)
                state_GMW = torch.addcmul(total_GMW, state_GMW, gain_G[:, None, None])
                mass_G = gain_G * mass_G + added_G
            log_decay_G = log_decay_G + keys.decay_GnC[..., -1].sum(-1)
        after = Carry(
            state_GMW.reshape(carry.sz_BHMW.shape),
            mass_G.reshape(carry.mass_BH.shape),
            log_decay_G.reshape(carry.log_decay_BH.shape),
        )
        return torch.stack(before, dim=1), after

    def _steps(self, keys: _Chunked, groups: int, tokens: int) -> torch.Tensor:
        """Cumulative key scale over the block, [G or 1, T]: 1, 2, 3, ... when there is none."""
        if keys.scale_GnC is None:
            return torch.arange(1, tokens + 1, dtype=self.dtype, device=keys.v1_GnCW.device)[None]
        return keys.scale_GnC.reshape(groups, tokens).cumsum(-1)

    def _gated_mass(self, keys: _Chunked, decay_GnCC: torch.Tensor, mass_G: torch.Tensor) -> torch.Tensor:
        """Mass at every token of the block, [G, n, C]."""
        assert keys.decay_GnC is not None  # only called with gates
        own_GnC = decay_GnCC.sum(-1) if keys.scale_GnC is None else (decay_GnCC @ keys.scale_GnC[..., None])[..., 0]
        before = []
        gains = keys.decay_GnC[..., -1].exp().unbind(1)
        for gain_G, added_G in zip(gains, own_GnC[..., -1].unbind(1), strict=True):
            before.append(mass_G)
            mass_G = gain_G * mass_G + added_G
        return keys.decay_GnC.exp() * torch.stack(before, dim=1)[..., None] + own_GnC


def _pair_decay(decay_GnC: torch.Tensor) -> torch.Tensor:
    """exp(c_t - c_i) for i <= t and 0 above, [G, n, C, C]."""
    size = decay_GnC.shape[-1]
    future_CC = torch.ones(size, size, dtype=torch.bool, device=decay_GnC.device).triu(1)
    return (decay_GnC[..., :, None] - decay_GnC[..., None, :]).masked_fill(future_CC, float("-inf")).exp()

"""The seam between models and sharding: the few operations that mix along the sequence.

A mixer or model receives a `SequenceOps` and never asks its rank. Everything else it does is pointwise along
the sequence.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from dist_attn.ops.affine import AffineCall, AffineState, Read
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.dense_space import DenseCall
from dist_attn.ops.diagonal import DiagonalCall
from dist_attn.ops.documents import DocumentPlaces
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.fourier import FourierNorm
from dist_attn.ops.legs import LegsState
from dist_attn.ops.linear_attention import LinearCall
from dist_attn.ops.linear_attention.call import DEFAULT_DENOMINATOR
from dist_attn.ops.relative_attention import RelativeCall, RelativeState
from dist_attn.ops.running_maximum import Maxima
from dist_attn.ops.selective_scan import SelectiveCall
from dist_attn.ops.softmax_attention import KeyValueCache, RelativePositions, SoftmaxCall, SoftmaxOptions
from dist_attn.ops.state import LinearState
from dist_attn.ops.token_mixing import Activation, TokenMlp
from dist_attn.ops.token_selection import Interpolation

__all__ = ["RoutedTokens", "SelectedTokens", "SequenceOps"]


class RoutedTokens(Protocol):
    """Tokens at the experts that were chosen for them; `dropped` assignments of all processes found no room."""

    @property
    def dropped(self) -> int: ...

    def by_expert(self) -> tuple[torch.Tensor, ...]:
        """The rows of every expert, [R_e, C]; none of experts that another process takes care of."""
        ...

    def restore_order(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Bring what experts made of their rows, one expert after the other, to the tokens: [R, D] -> [K, N, D]."""
        ...


class SelectedTokens(Protocol):
    """The tokens that were kept, spread evenly, with their positions and the operations along them.

    `total` counts them on all processes.
    """

    @property
    def x_NC(self) -> torch.Tensor: ...

    @property
    def position_N(self) -> torch.Tensor: ...

    @property
    def total(self) -> int: ...

    @property
    def ops(self) -> "SequenceOps": ...

    def upsample(self, z_ND: torch.Tensor, how: Interpolation) -> torch.Tensor:
        """Values at all positions of the sequence that was selected from, [N, D] of the kept ones -> [L, D]."""
        ...


class SequenceOps(ABC):
    """The operations that mix along the sequence, on whatever slice of it this process holds.

    Operations are those of `dist_attn.ops` by the same names, which explain them. Those with many arguments make one
    value of them, the call, which implementations compute.
    """

    def linear_attention(
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
        """See `dist_attn.ops.linear_attention`."""
        return self._attend(
            LinearCall(
                q_BHLK,
                k_BHSK,
                v_BHSV,
                log_gate_BHS,
                key_scale_BHS,
                feature_map=feature_map,
                causal=causal,
                state=state,
                denominator=DEFAULT_DENOMINATOR if denominator is None else denominator,
                prefix=prefix,
            )
        )

    @abstractmethod
    def _attend(self, call: LinearCall) -> tuple[torch.Tensor, LinearState]: ...

    def affine_recurrence(
        self,
        q_BHLK: torch.Tensor,
        k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        *,
        log_decay_BHLK: torch.Tensor,
        erase: tuple[torch.Tensor, torch.Tensor] | None = None,
        bonus_HK: torch.Tensor | None = None,
        read: Read = "after",
        state: AffineState | None = None,
    ) -> tuple[torch.Tensor, AffineState]:
        """See `dist_attn.ops.affine_recurrence`."""
        return self._recur(AffineCall(q_BHLK, k_BHLK, v_BHLV, log_decay_BHLK, erase, None, bonus_HK, read, state))

    def gated_delta_rule(
        self,
        q_BHLK: torch.Tensor,
        k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        *,
        beta_BHL: torch.Tensor,
        log_decay_BHLK: torch.Tensor,
        state: AffineState | None = None,
    ) -> tuple[torch.Tensor, AffineState]:
        """See `dist_attn.ops.gated_delta_rule`."""
        return self._recur(AffineCall(q_BHLK, k_BHLK, v_BHLV, log_decay_BHLK, beta_BHL=beta_BHL, state=state))

    @abstractmethod
    def _recur(self, call: AffineCall) -> tuple[torch.Tensor, AffineState]: ...

    def relative_attention(
        self,
        phi_q_BHLK: torch.Tensor,
        phi_k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        phi_rp_HRK: torch.Tensor,
        *,
        causal: bool,
    ) -> torch.Tensor:
        """See `dist_attn.ops.relative_attention`."""
        return self._attend_relative(RelativeCall(phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK, causal))

    @abstractmethod
    def _attend_relative(self, call: RelativeCall) -> torch.Tensor: ...

    def relative_attention_streaming(
        self,
        phi_q_BHLK: torch.Tensor,
        phi_k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        phi_rp_HRK: torch.Tensor,
        state: RelativeState | None = None,
    ) -> tuple[torch.Tensor, RelativeState]:
        """See `dist_attn.ops.relative_attention_streaming`."""
        return self._stream_relative(RelativeCall(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, state=state))

    @abstractmethod
    def _stream_relative(self, call: RelativeCall) -> tuple[torch.Tensor, RelativeState]: ...

    def softmax_attention(
        self,
        q_BHLK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSV: torch.Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        prefix: int = 0,
        relative: RelativePositions | None = None,
    ) -> torch.Tensor:
        """See `dist_attn.ops.softmax_attention`."""
        options = SoftmaxOptions(scale, relative=relative)
        return self._attend_exactly(SoftmaxCall(q_BHLK, k_BGSK, v_BGSV, causal, options, prefix=prefix))

    @abstractmethod
    def _attend_exactly(self, call: SoftmaxCall) -> torch.Tensor: ...

    def softmax_attention_streaming(
        self,
        q_BHLK: torch.Tensor,
        k_BGLK: torch.Tensor,
        v_BGLV: torch.Tensor,
        cache: KeyValueCache,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
        relative: RelativePositions | None = None,
    ) -> tuple[torch.Tensor, KeyValueCache]:
        """See `dist_attn.ops.softmax_attention_streaming` and `SoftmaxOptions`."""
        options = SoftmaxOptions(scale, window, softcap, sinks_H, relative)
        return self._attend_onward(SoftmaxCall(q_BHLK, k_BGLK, v_BGLV, True, options), cache)

    @abstractmethod
    def _attend_onward(self, call: SoftmaxCall, cache: KeyValueCache) -> tuple[torch.Tensor, KeyValueCache]: ...

    @abstractmethod
    def convolve(self, x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False) -> torch.Tensor: ...

    @abstractmethod
    def convolve_streaming(
        self, x_BLD: torch.Tensor, w_KD: torch.Tensor, tail_BKD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def long_convolve(
        self, x_BLD: torch.Tensor, kernel_LD: torch.Tensor, *, backward_kernel_LD: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def diagonal_scan(
        self,
        u_BLD: torch.Tensor,
        a_DN: torch.Tensor,
        b_DN: torch.Tensor,
        c_DN: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dist_attn.ops.diagonal_scan`."""
        return self._scan_diagonal(DiagonalCall(u_BLD, a_DN, b_DN, c_DN, state))

    @abstractmethod
    def _scan_diagonal(self, call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def gated_scan(
        self, x_BLD: torch.Tensor, log_decay_BLD: torch.Tensor, *, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def selective_scan(
        self,
        x_BLD: torch.Tensor,
        dt_BLD: torch.Tensor,
        a_DN: torch.Tensor,
        b_BLN: torch.Tensor,
        c_BLN: torch.Tensor,
        *,
        skip_D: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dist_attn.ops.selective_scan`."""
        return self._scan_selected(SelectiveCall(x_BLD, dt_BLD, a_DN, b_BLN, c_BLN, skip_D, state))

    @abstractmethod
    def _scan_selected(self, call: SelectiveCall) -> tuple[torch.Tensor, torch.Tensor]: ...

    def dense_scan(
        self,
        u_BLD: torch.Tensor,
        a_DNN: torch.Tensor,
        b_DN: torch.Tensor,
        c_DMN: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dist_attn.ops.dense_scan`; one unbroken sequence only."""
        return self._scan_dense(DenseCall(u_BLD, a_DNN, b_DN, c_DMN, state))

    @abstractmethod
    def _scan_dense(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def legs_memory(
        self, f_BLD: torch.Tensor, read_DN: torch.Tensor, *, state: LegsState | None = None
    ) -> tuple[torch.Tensor, LegsState]: ...

    def mix_tokens(
        self,
        x_BLD: torch.Tensor,
        w_in_LS: torch.Tensor,
        w_out_SL: torch.Tensor,
        *,
        bias_in_S: torch.Tensor | None = None,
        bias_out_L: torch.Tensor | None = None,
        activation: Activation = "gelu_tanh",
    ) -> torch.Tensor:
        """See `dist_attn.ops.mix_tokens`; one unbroken sequence only, weights for all of its tokens."""
        return self._mix_tokens(x_BLD, TokenMlp(w_in_LS, w_out_SL, bias_in_S, bias_out_L, activation))

    @abstractmethod
    def _mix_tokens(self, x_BLD: torch.Tensor, mlp: TokenMlp) -> torch.Tensor: ...

    @abstractmethod
    def fourier_mix(self, x_BLD: torch.Tensor, *, norm: FourierNorm = None) -> torch.Tensor: ...

    @abstractmethod
    def select_tokens(
        self, x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
    ) -> SelectedTokens: ...

    @abstractmethod
    def route_tokens(
        self, x_LC: torch.Tensor, expert_LK: torch.Tensor, *, num_experts: int, capacity: int
    ) -> RoutedTokens: ...

    @abstractmethod
    def running_maximum(
        self, x_BHS: torch.Tensor, before_BH: torch.Tensor, *, log_gate_BHS: torch.Tensor | None = None
    ) -> Maxima: ...

    @abstractmethod
    def sum_over_sequence(self, x_BLD: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def sum_over_documents(self, x_BLD: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def document_places(self, length: int) -> DocumentPlaces: ...

    @abstractmethod
    def positions(self, length: int | None = None, device: torch.device | str = "cpu") -> torch.Tensor: ...

    @abstractmethod
    def total_length(self, length: int) -> int: ...

    @property
    @abstractmethod
    def cuts(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def whole(self) -> bool: ...

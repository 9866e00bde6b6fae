"""The seam between models and sharding: the few operations that mix along the sequence.

A mixer or model receives a `SequenceOps` and never asks its rank. Everything else it does is pointwise along
the sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dist_attn.ops.affine import AffineCall, AffineState, Read
from dist_attn.ops.convolution import ConvolutionCall, ConvolutionStreamCall
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import DocumentPlaces, SumCall
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention import LinearCall
from dist_attn.ops.linear_attention.call import DEFAULT_DENOMINATOR
from dist_attn.ops.running_maximum import Maxima, MaximumCall
from dist_attn.ops.selective_scan import GatedCall, SelectiveCall
from dist_attn.ops.sequence_call import Result, SequenceCall
from dist_attn.ops.softmax_attention import (
    KeyValueCache,
    RelativePositions,
    SoftmaxCall,
    SoftmaxOptions,
    SoftmaxStreamCall,
)
from dist_attn.ops.state import LinearState


class SequenceOps(ABC):
    """The operations that mix along the sequence, on whatever slice of it this process holds.

    Operations are those of `dist_attn.ops` by the same names, which explain them: each makes one value of its
    arguments, the call, which `run` computes. So does an operation of another package, see `SequenceCall`.
    """

    @abstractmethod
    def run(self, call: SequenceCall[Result]) -> Result:
        """Compute a call by the form that is registered for its kind.

        Raises: ConfigError where none is; InputError for packed documents that the operation does not take.
        """

    @contextmanager
    def deferred_states(self) -> Iterator[None]:
        """Let calls without gradients return states whose numbers come by the end: nothing may read them before.

        Ranks then do not wait in every layer for the last one, which alone has them.
        """
        yield

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
        return self.run(
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
        return self.run(AffineCall(q_BHLK, k_BHLK, v_BHLV, log_decay_BHLK, erase, None, bonus_HK, read, state))

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
        return self.run(AffineCall(q_BHLK, k_BHLK, v_BHLV, log_decay_BHLK, beta_BHL=beta_BHL, state=state))

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
        return self.run(SoftmaxCall(q_BHLK, k_BGSK, v_BGSV, causal, options, prefix=prefix))

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
        return self.run(SoftmaxStreamCall(q_BHLK, k_BGLK, v_BGLV, cache, options))

    def convolve(self, x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
        """See `dist_attn.ops.convolve`."""
        return self.run(ConvolutionCall(x_BLD, w_KD, centred))

    def convolve_streaming(
        self, x_BLD: torch.Tensor, w_KD: torch.Tensor, tail_BKD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dist_attn.ops.convolve_streaming`."""
        return self.run(ConvolutionStreamCall(x_BLD, w_KD, tail_BKD))

    def gated_scan(
        self, x_BLD: torch.Tensor, log_decay_BLD: torch.Tensor, *, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dist_attn.ops.gated_scan`."""
        return self.run(GatedCall(x_BLD, log_decay_BLD, state))

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
        return self.run(SelectiveCall(x_BLD, dt_BLD, a_DN, b_BLN, c_BLN, skip_D, state))

    def running_maximum(
        self, x_BHS: torch.Tensor, before_BH: torch.Tensor, *, log_gate_BHS: torch.Tensor | None = None
    ) -> Maxima:
        """See `dist_attn.ops.running_maximum`."""
        return self.run(MaximumCall(x_BHS, before_BH, log_gate_BHS))

    def sum_over_sequence(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sum over the tokens of all processes, [B, L, D] -> [B, D], on every one."""
        return self.run(SumCall(x_BLD))

    def sum_over_documents(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sums over the tokens of each document on all processes, [B, L, D] -> [B, N, D], on every one."""
        return self.run(SumCall(x_BLD, by_document=True))

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

"""`SequenceOps` over a sequence that lies whole in this process, in packed documents or not."""

from dataclasses import dataclass, replace

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.affine import AffineCall, AffineState, recur
from dist_attn.ops.convolution import convolve, convolve_streaming
from dist_attn.ops.dense_space import DenseCall, scan_dense
from dist_attn.ops.diagonal import DiagonalCall, scan_diagonal
from dist_attn.ops.documents import (
    DocumentPlaces,
    check_documents,
    document_places,
    document_ranges,
    document_starts,
    sums_of_documents,
)
from dist_attn.ops.fourier import FourierNorm, fourier_mix
from dist_attn.ops.legs import LegsState, legs_memory
from dist_attn.ops.linear_attention import Implementation, LinearCall, attend, check_implementation, check_prefix
from dist_attn.ops.long_convolution import long_convolve
from dist_attn.ops.relative_attention import RelativeCall, RelativeState, attend_relative, stream_relative
from dist_attn.ops.running_maximum import Maxima, running_maximum
from dist_attn.ops.selective_scan import SelectiveCall, gated_scan, scan_selected
from dist_attn.ops.sequence_ops import RoutedTokens, SelectedTokens, SequenceOps
from dist_attn.ops.softmax_attention import (
    KeyValueCache,
    SoftmaxCall,
    attend_documents,
    attend_exactly,
    attend_onward,
)
from dist_attn.ops.state import LinearState
from dist_attn.ops.token_mixing import TokenMlp, apply_token_mlp
from dist_attn.ops.token_routing import route_tokens
from dist_attn.ops.token_selection import Interpolation, select_tokens, upsample

__all__ = ["LocalSequenceOps"]


@dataclass(frozen=True)
class LocalSequenceOps(SequenceOps):
    """All operations on a sequence that lies whole in this process.

    `documents` are the positions at which packed documents start; None: one unbroken sequence. Documents never see each
    other. Tokens before the first start continue the document that a state or a tail given is of; states and tails that
    come out are those of the last document. Sums over the sequence and positions are those of the whole sequence.

    Raises: InputError for documents that are not rising whole numbers, and from operations that do not take them;
        ShapeError from operations for a document that starts behind the sequence, or for keys of another sequence;
        ConfigError for an implementation that does not exist, and from operations whose call it cannot take.
    """

    documents: tuple[int, ...] | None = None
    implementation: Implementation = "auto"  # of linear and relative attention, see `ops.linear_attention.choose`

    def __post_init__(self) -> None:
        check_implementation(self.implementation)
        if self.documents is not None:
            object.__setattr__(self, "documents", document_starts(self.documents))

    def _attend(self, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
        return attend(replace(call, documents=self.documents or (), implementation=self.implementation))

    def _recur(self, call: AffineCall) -> tuple[torch.Tensor, AffineState]:
        return recur(replace(call, documents=self.documents or (), implementation=self.implementation))

    def _attend_exactly(self, call: SoftmaxCall) -> torch.Tensor:
        if self.documents:
            check_prefix(call.prefix, causal=call.causal, documents=True)
            return attend_documents(call, self.documents)
        return attend_exactly(call)

    def _attend_onward(self, call: SoftmaxCall, cache: KeyValueCache) -> tuple[torch.Tensor, KeyValueCache]:
        return attend_onward(call, cache, self.documents or ())

    def _attend_relative(self, call: RelativeCall) -> torch.Tensor:
        return attend_relative(replace(call, documents=self.documents or (), implementation=self.implementation))

    def _stream_relative(self, call: RelativeCall) -> tuple[torch.Tensor, RelativeState]:
        self._refuse_documents("relative_attention_streaming")
        return stream_relative(replace(call, implementation=self.implementation))

    def convolve(self, x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
        """See `dist_attn.ops.convolve`."""
        return convolve(x_BLD, w_KD, centred=centred, documents=self.documents)

    def convolve_streaming(
        self, x_BLD: torch.Tensor, w_KD: torch.Tensor, tail_BKD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dist_attn.ops.convolve_streaming`."""
        return convolve_streaming(x_BLD, w_KD, tail_BKD, documents=self.documents)

    def long_convolve(
        self, x_BLD: torch.Tensor, kernel_LD: torch.Tensor, *, backward_kernel_LD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `dist_attn.ops.long_convolve`."""
        return long_convolve(x_BLD, kernel_LD, backward_kernel_LD=backward_kernel_LD, documents=self.documents)

    def _scan_diagonal(self, call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
        return scan_diagonal(replace(call, documents=self.documents or ()))

    def gated_scan(
        self, x_BLD: torch.Tensor, log_decay_BLD: torch.Tensor, *, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dist_attn.ops.gated_scan`."""
        return gated_scan(x_BLD, log_decay_BLD, state=state, documents=self.documents)

    def _scan_selected(self, call: SelectiveCall) -> tuple[torch.Tensor, torch.Tensor]:
        return scan_selected(replace(call, documents=self.documents or ()))

    def _scan_dense(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse_documents("dense_scan")
        return scan_dense(call)

    def legs_memory(
        self, f_BLD: torch.Tensor, read_DN: torch.Tensor, *, state: LegsState | None = None
    ) -> tuple[torch.Tensor, LegsState]:
        """See `dist_attn.ops.legs_memory`; one unbroken sequence only."""
        self._refuse_documents("legs_memory")
        return legs_memory(f_BLD, read_DN, state=state)

    def _mix_tokens(self, x_BLD: torch.Tensor, mlp: TokenMlp) -> torch.Tensor:
        self._refuse_documents("mix_tokens")
        return apply_token_mlp(x_BLD, mlp)

    def fourier_mix(self, x_BLD: torch.Tensor, *, norm: FourierNorm = None) -> torch.Tensor:
        """See `dist_attn.ops.fourier_mix`."""
        return fourier_mix(x_BLD, norm=norm, documents=self.documents)

    def select_tokens(
        self, x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
    ) -> SelectedTokens:
        """See `dist_attn.ops.token_selection.select_tokens`; one unbroken sequence only."""
        self._refuse_documents("select_tokens")
        kept = select_tokens(x_LC, score_L, threshold=threshold, at_most=at_most)
        return _LocallySelected(*kept, length=len(x_LC), ops=self)

    def route_tokens(
        self, x_LC: torch.Tensor, expert_LK: torch.Tensor, *, num_experts: int, capacity: int
    ) -> RoutedTokens:
        """See `dist_attn.ops.token_routing.route_tokens`; one unbroken sequence only."""
        self._refuse_documents("route_tokens")
        return route_tokens(x_LC, expert_LK, num_experts=num_experts, capacity=capacity)

    def running_maximum(
        self, x_BHS: torch.Tensor, before_BH: torch.Tensor, *, log_gate_BHS: torch.Tensor | None = None
    ) -> Maxima:
        """See `dist_attn.ops.running_maximum`."""
        return running_maximum(x_BHS, before_BH, log_gate_BHS=log_gate_BHS, documents=self.documents or ())

    def sum_over_sequence(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sum over all tokens, [B, L, D] -> [B, D]."""
        return x_BLD.sum(dim=1)

    def sum_over_documents(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sums over the tokens of each document, [B, L, D] -> [B, N, D]."""
        return sums_of_documents(x_BLD, self.document_places(x_BLD.shape[1]))

    def document_places(self, length: int) -> DocumentPlaces:
        """The places of the `length` tokens held here in their documents; an unbroken sequence is one.

        Raises: ShapeError for a document that starts behind the sequence.
        """
        check_documents(self.documents or (), length)
        starts = self.documents or ()
        return document_places(document_ranges(starts, length), 0, length, starts)

    def positions(self, length: int | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Global index of each of the `length` tokens held here, [L], counted from the start of this call's sequence.

        Raises: ShapeError without a length: only a layout would know it.
        """
        if length is None:
            raise ShapeError("positions() of a local sequence needs its length: positions(length)")
        return torch.arange(length, device=device)

    def total_length(self, length: int) -> int:
        """Tokens of the whole sequence when `length` of them are held here."""
        return length

    @property
    def cuts(self) -> tuple[int, ...]:
        """The positions at which the sequence is cut between processes; the same answer on every rank."""
        return ()

    @property
    def whole(self) -> bool:
        """Return whether all tokens are held here, whatever the layout; the same answer on every rank."""
        return True

    def _refuse_documents(self, operation: str) -> None:
        if self.documents:
            raise InputError(
                f"{operation} was given {len(self.documents)} packed documents; it takes one unbroken sequence. Call "
                "it once per document"
            )


@dataclass(frozen=True)
class _LocallySelected:
    """The tokens kept of a sequence that lies whole in this process."""

    x_NC: torch.Tensor
    position_N: torch.Tensor
    length: int
    ops: SequenceOps

    @property
    def total(self) -> int:
        return len(self.position_N)

    def upsample(self, z_ND: torch.Tensor, how: Interpolation) -> torch.Tensor:
        """See `dist_attn.ops.token_selection.upsample`."""
        return upsample(z_ND, self.position_N, torch.arange(self.length, device=z_ND.device), how)

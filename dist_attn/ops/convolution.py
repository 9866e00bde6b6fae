"""Short depthwise convolution along the sequence, as a sum of shifted products; in packed documents too.

No tap reaches across the start of a document.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.ops.documents import check_documents, document_numbers
from dist_attn.ops.sequence_call import SequenceCall, local_form


def convolve(
    x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False, documents: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Depthwise convolution y_t = sum_j w_j x_{t-j}, zero outside; `centred` shifts by K // 2.

    With packed `documents`, given by their starts, that of every document by itself.

    Shapes: x [B, L, D], w [K, D] -> [B, L, D].
    Raises: ShapeError when they do not fit together, or a document starts behind the sequence.
    Reference: A Unified View of Long-Sequence Models, Eq. 3.
    """
    check_taps(x_BLD, w_KD)
    taps = w_KD.shape[0]
    ahead = taps // 2 if centred else 0
    behind = taps - 1 - ahead
    padded = F.pad(x_BLD, (0, 0, behind, ahead))
    if not documents:
        return convolve_padded(padded, w_KD)
    check_documents(documents, x_BLD.shape[1])
    number_L = document_numbers(documents, x_BLD.shape[1], x_BLD.device)
    # What lies outside is zero anyway, whatever document it is said to be of.
    return convolve_numbered(padded, w_KD, F.pad(number_L, (behind, ahead)), behind)


def convolve_streaming(
    x_BLD: torch.Tensor,
    w_KD: torch.Tensor,
    tail_BKD: torch.Tensor | None = None,
    *,
    documents: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal `convolve` that continues after `tail`, the last K - 1 tokens before x (zeros when None).

    With packed `documents` the tail in is that of the tokens before the first start; the tail out is that of the last
    document, with zeros for tokens before its start.

    Shapes: x [B, L, D], w [K, D], tail [B, K - 1, D] -> y [B, L, D] and the tail after x.
    Raises: ShapeError when they do not fit together.
    """
    check_taps(x_BLD, w_KD)
    length, keep = x_BLD.shape[1], w_KD.shape[0] - 1
    padded = torch.cat([tail_of(x_BLD, keep, tail_BKD), x_BLD], dim=1)
    after = padded[:, padded.shape[1] - keep :]
    # Copies of the tail: a view would keep the whole block alive for as long as the state lives.
    if not documents:
        return convolve_padded(padded, w_KD), after.clone()
    check_documents(documents, length)
    number_T = F.pad(document_numbers(documents, length, x_BLD.device), (keep, 0))
    foreign_K = number_T[number_T.shape[0] - keep :] != number_T[-1:]
    return convolve_numbered(padded, w_KD, number_T, keep), after.masked_fill(foreign_K[:, None], 0.0)


@dataclass(frozen=True)
class ConvolutionCall(SequenceCall[torch.Tensor]):
    """The arguments of `convolve`, which explains them."""

    x_BLD: torch.Tensor
    w_KD: torch.Tensor
    centred: bool = False

    operation: ClassVar[str] = "convolve"
    along: ClassVar[tuple[str, ...]] = ("x_BLD",)
    deterministic: ClassVar[bool] = True


@local_form(ConvolutionCall)
def convolve_call(call: ConvolutionCall) -> torch.Tensor:
    """`convolve` of a call."""
    return convolve(call.x_BLD, call.w_KD, centred=call.centred, documents=call.documents)


@dataclass(frozen=True)
class ConvolutionStreamCall(SequenceCall[tuple[torch.Tensor, torch.Tensor]]):
    """The arguments of `convolve_streaming`, which explains them."""

    x_BLD: torch.Tensor
    w_KD: torch.Tensor
    tail_BKD: torch.Tensor | None = None

    operation: ClassVar[str] = "convolve_streaming"
    along: ClassVar[tuple[str, ...]] = ("x_BLD",)
    deterministic: ClassVar[bool] = True


@local_form(ConvolutionStreamCall)
def convolve_stream_call(call: ConvolutionStreamCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`convolve_streaming` of a call."""
    return convolve_streaming(call.x_BLD, call.w_KD, call.tail_BKD, documents=call.documents)


def convolve_padded(padded_BTD: torch.Tensor, w_KD: torch.Tensor) -> torch.Tensor:
    """The convolution where all K taps reach real rows: T rows in, T - K + 1 out."""
    w_KD = w_KD.to(padded_BTD.dtype)
    if torch.compiler.is_compiling():  # a compiler fuses the steps and their derivatives
        terms = (w_D * x_BLD for w_D, x_BLD in zip(w_KD, _shifted(padded_BTD, w_KD.shape[0]), strict=True))
        whole_BLD: torch.Tensor = reduce(torch.add, terms)
        return whole_BLD
    y_BLD: torch.Tensor = _Convolution.apply(padded_BTD, w_KD)  # type: ignore[no-untyped-call]
    return y_BLD


class _Convolution(torch.autograd.Function):
    """`convolve_padded` with a backward pass of two more such convolutions: a third of autograd's own steps."""

    @staticmethod
    def forward(ctx: Any, padded_BTD: torch.Tensor, w_KD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(padded_BTD, w_KD)
        newest, *older = _shifted(padded_BTD, w_KD.shape[0])
        y_BLD = w_KD[0] * newest
        for w_D, x_BLD in zip(w_KD[1:], older, strict=True):
            # Fused, a CPU rounds once where encodings have always been rounded twice.
            y_BLD = y_BLD.add_(w_D * x_BLD) if y_BLD.device.type == "cpu" else y_BLD.addcmul_(w_D, x_BLD)
        return y_BLD

    @staticmethod
    def backward(ctx: Any, grad_BLD: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        padded_BTD, w_KD = ctx.saved_tensors
        taps, (needs_x, needs_w) = w_KD.shape[0], ctx.needs_input_grad
        around = F.pad(grad_BLD, (0, 0, taps - 1, taps - 1)) if needs_x else None
        return (
            None if around is None else convolve_padded(around, w_KD.flip(0)),
            torch.stack([(grad_BLD * x).sum((0, 1)) for x in _shifted(padded_BTD, taps)]) if needs_w else None,
        )


def _shifted(padded_BTD: torch.Tensor, taps: int) -> list[torch.Tensor]:
    """The rows that each tap reaches, [B, T - K + 1, D]."""
    length = padded_BTD.shape[1] - taps + 1
    return [padded_BTD[:, first : first + length] for first in reversed(range(taps))]


def tail_of(x_BLD: torch.Tensor, keep: int, tail_BKD: torch.Tensor | None) -> torch.Tensor:
    """The `keep` tokens before x in its dtype, zeros when None.

    Raises: ShapeError for a tail of another shape.
    """
    wanted = (x_BLD.shape[0], keep, x_BLD.shape[2])
    if tail_BKD is None:
        return x_BLD.new_zeros(wanted)
    if tail_BKD.shape != wanted:
        raise ShapeError(f"the tail has shape {tuple(tail_BKD.shape)}; needed is [batch, K - 1, size] = {wanted}")
    return tail_BKD.to(x_BLD.dtype)


def check_taps(x_BLD: torch.Tensor, w_KD: torch.Tensor) -> None:
    """Raise ShapeError when x and the taps do not fit together."""
    if x_BLD.dim() != 3 or w_KD.dim() != 2 or x_BLD.shape[2] != w_KD.shape[1] or not w_KD.shape[0]:
        raise ShapeError(
            f"x has shape {tuple(x_BLD.shape)} and w {tuple(w_KD.shape)}; needed are x [B, L, D] and w [K, D], K >= 1"
        )


def convolve_numbered(
    padded_BTD: torch.Tensor, w_KD: torch.Tensor, number_T: torch.Tensor, behind: int
) -> torch.Tensor:
    """The convolution where all K taps reach rows, of which only those of a token's own document count.

    `number` is the document of each row, `behind` how many taps reach rows before a token's own: T rows in,
    T - K + 1 out.
    """
    taps = w_KD.shape[0]
    length = padded_BTD.shape[1] - taps + 1
    w_KD = w_KD.to(padded_BTD.dtype)
    own_L = number_T[behind : behind + length]
    y_BLD = padded_BTD.new_zeros((padded_BTD.shape[0], length, padded_BTD.shape[2]))
    for j in range(taps):
        at = slice(taps - 1 - j, taps - 1 - j + length)
        foreign_L1 = (number_T[at] != own_L)[:, None]
        y_BLD = y_BLD + w_KD[j] * padded_BTD[:, at].masked_fill(foreign_L1, 0.0)
    return y_BLD


def convolve_naive(x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
    """y_t = sum_j w_j x_{t-j} by two loops; see `convolve`."""
    length, taps = x_BLD.shape[1], w_KD.shape[0]
    shift = taps // 2 if centred else 0
    y_BLD = torch.zeros_like(x_BLD)
    for t in range(length):
        for j in range(taps):
            if 0 <= t - j + shift < length:
                y_BLD[:, t] = y_BLD[:, t] + w_KD[j] * x_BLD[:, t - j + shift]
    return y_BLD

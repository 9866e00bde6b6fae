"""Short depthwise convolution inside each of many packed documents: no tap reaches across the start of one."""

import torch
import torch.nn.functional as F

from dist_attn.ops.convolution.direct import check_taps, tail_of
from dist_attn.ops.documents import check_documents, document_numbers

__all__ = ["convolve_numbered", "packed_convolve", "packed_convolve_streaming"]


def packed_convolve(
    x_BLD: torch.Tensor, w_KD: torch.Tensor, *, documents: tuple[int, ...], centred: bool = False
) -> torch.Tensor:
    """`convolve` of every document by itself.

    Shapes: x [B, L, D], w [K, D] -> [B, L, D].
    """
    check_taps(x_BLD, w_KD)
    length, taps = x_BLD.shape[1], w_KD.shape[0]
    check_documents(documents, length)
    ahead = taps // 2 if centred else 0
    number_L = document_numbers(documents, length, x_BLD.device)
    behind = taps - 1 - ahead
    # What lies outside is zero anyway, whatever document it is said to be of.
    return convolve_numbered(F.pad(x_BLD, (0, 0, behind, ahead)), w_KD, F.pad(number_L, (behind, ahead)), behind)


def packed_convolve_streaming(
    x_BLD: torch.Tensor, w_KD: torch.Tensor, tail_BKD: torch.Tensor | None = None, *, documents: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`convolve_streaming` of every document by itself.

    The tail in is that of the tokens before the first start; the tail out is that of the last document, with zeros for
    tokens before its start.

    Shapes: x [B, L, D], w [K, D], tail [B, K - 1, D] -> y [B, L, D] and the tail after x.
    """
    check_taps(x_BLD, w_KD)
    length, keep = x_BLD.shape[1], w_KD.shape[0] - 1
    check_documents(documents, length)
    padded = torch.cat([tail_of(x_BLD, keep, tail_BKD), x_BLD], dim=1)
    number_T = F.pad(document_numbers(documents, length, x_BLD.device), (keep, 0))
    after = padded[:, padded.shape[1] - keep :]
    foreign_K = number_T[number_T.shape[0] - keep :] != number_T[-1:]
    # A copy: a view would keep the whole block alive for as long as the state lives.
    return convolve_numbered(padded, w_KD, number_T, keep), after.masked_fill(foreign_K[:, None], 0.0)


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

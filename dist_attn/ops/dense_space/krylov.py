"""Powers of a matrix applied to a vector, by doubling: a logarithm of products in place of one for each power.

Errors of products by doubling add up, so all of them keep the precision of the matrix under autocast.
"""

import torch

__all__ = ["columns_of_powers", "matrix_power", "rows_of_powers"]


def columns_of_powers(a_DNN: torch.Tensor, b_DN: torch.Tensor, count: int) -> torch.Tensor:
    """b, A b, …, A^(count - 1) b, [D, N, count]."""
    found_DNC, square_DNN = b_DN[..., None], a_DNN
    with torch.autocast(a_DNN.device.type, enabled=False):
        while found_DNC.shape[2] < count:
            found_DNC = torch.cat([found_DNC, square_DNN @ found_DNC], dim=2)
            square_DNN = square_DNN @ square_DNN
    return found_DNC[..., :count]


def rows_of_powers(c_DMN: torch.Tensor, a_DNN: torch.Tensor, count: int) -> torch.Tensor:
    """C A, C A^2, …, C A^count, [D, count, M, N]."""
    with torch.autocast(a_DNN.device.type, enabled=False):
        found_DCMN, square_DNN = (c_DMN @ a_DNN)[:, None], a_DNN
        while found_DCMN.shape[1] < count:
            found_DCMN = torch.cat([found_DCMN, found_DCMN @ square_DNN[:, None]], dim=1)
            square_DNN = square_DNN @ square_DNN
    return found_DCMN[:, :count]


def matrix_power(a_DNN: torch.Tensor, exponent: int) -> torch.Tensor:
    """A^exponent by repeated squaring; the identity for exponent 0."""
    result_DNN = torch.eye(a_DNN.shape[1], dtype=a_DNN.dtype, device=a_DNN.device).expand_as(a_DNN)
    square_DNN = a_DNN
    with torch.autocast(a_DNN.device.type, enabled=False):
        while exponent:
            if exponent & 1:
                result_DNN = result_DNN @ square_DNN
            exponent >>= 1
            square_DNN = square_DNN @ square_DNN if exponent else square_DNN
    return result_DNN

"""HiPPO-LegS: the state that holds the best polynomial approximation of the whole past, scaled Legendre basis."""

import torch

__all__ = ["legs", "legs_eigenvalues"]


def legs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [N, N], B [N] and P [N] in float64, with A + P P^T = -1/2 I + a skew-symmetric matrix.

    Reference: HiPPO (LegS) in the signs of S4; A Unified View of Long-Sequence Models, Sec. 7.
    """
    n = torch.arange(size, dtype=torch.float64)
    b_N = (2 * n + 1).sqrt()
    a_NN = -(b_N[:, None] * b_N).tril(-1) - torch.diag(n + 1)
    return a_NN, b_N, (n + 0.5).sqrt()


def legs_eigenvalues(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The eigenvalues of A + P P^T above the real axis; B and P in their eigenvectors: [N / 2] complex128 each.

    All real parts are -1/2. The other half are the conjugates. N is even.
    """
    a_NN, b_N, p_N = legs(size)
    normal_NN = a_NN + p_N[:, None] * p_N
    skew_NN = (normal_NN - normal_NN.T) / 2
    # -i times a skew-symmetric matrix is Hermitian: its eigenvalues are real and its eigenvectors orthogonal.
    imaginary_N, vectors_NN = torch.linalg.eigh(-1j * skew_NN)
    upper = slice(size - size // 2, None)
    values = torch.complex(torch.full_like(imaginary_N, -0.5), imaginary_N)[upper]
    b_N, p_N = (vectors_NN.conj().T @ torch.stack([b_N, p_N], dim=1).to(vectors_NN.dtype)).unbind(1)
    return values, b_N[upper], p_N[upper]

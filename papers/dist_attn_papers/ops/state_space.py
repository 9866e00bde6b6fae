"""Linear state spaces x' = A x + B u, y = C x: their matrices, their steps in discrete time, and their kernels.

The kernel of a diagonal state space comes without the matrix of all powers. With l = C i + j a power a^l is
a^(C i) a^j, so the kernel is one product of two small matrices of powers per channel: about 2 sqrt(L) numbers for each
eigenvalue in place of L. That of a diagonal plus a low rank (S4), A = Lambda - P P^*, takes O((N + log L) L); one of
each conjugate pair of eigenvalues is kept. HiPPO-LegS is the state that holds the best polynomial approximation of the
whole past.
"""

import math
from typing import Literal

import torch

from dist_attn.ops.device import without_autocast
from dist_attn_papers.ops.diagonal import power, powers

Rule = Literal["zoh", "bilinear"]


def discretise(
    a_DN: torch.Tensor, b_DN: torch.Tensor, dt_D: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of x_t = a x_{t-1} + b u_t for x' = A x + B u: the input held over a step, or the trapezoidal rule.

    Shapes: a, b [D, N] complex, dt [D] real and positive -> the same of the discrete system.
    Reference: A Unified View of Long-Sequence Models, Sec. 7; S4D, zero-order hold and bilinear.
    """
    step_DN = dt_D[:, None] * a_DN
    if rule == "bilinear":
        inverse_DN = 1 / (1 - step_DN / 2)
        return (1 + step_DN / 2) * inverse_DN, dt_D[:, None] * b_DN * inverse_DN
    # (e^(dt A) - 1) / A loses its digits for small steps unless the difference is taken as one function.
    return step_DN.exp(), _expm1(step_DN) / a_DN * b_DN


def _expm1(z: torch.Tensor) -> torch.Tensor:
    """e^z - 1 of complex numbers: e^x cos y - 1 = expm1(x) cos y - 2 sin^2(y / 2)."""
    x, y = z.real, z.imag
    return torch.complex(torch.expm1(x) * y.cos() - 2 * (y / 2).sin() ** 2, x.exp() * y.sin())


def discretise_dense(
    a_NN: torch.Tensor, b_N: torch.Tensor, dt_D: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and b of x_t = A x_{t-1} + b u_t: (I - alpha dt A)^-1 times I + (1 - alpha) dt A, and times dt b.

    `alpha` 0 is Euler's rule, 1/2 the trapezoidal one (Tustin), 1 the backward one.

    Shapes: a [..., N, N] and b [..., N], one for all channels or one for each; dt [D] -> [D, N, N] and [D, N].
    Reference: A Unified View of Long-Sequence Models, Sec. 7 (LSSL).
    """
    step_DNN = dt_D[:, None, None] * a_NN
    one_NN = torch.eye(a_NN.shape[-1], dtype=a_NN.dtype, device=a_NN.device)
    right_DNX = torch.cat([one_NN + (1 - alpha) * step_DNN, (dt_D[:, None] * b_N)[..., None]], dim=2)
    solved_DNX = torch.linalg.solve(one_NN - alpha * step_DNN, right_DNX)
    return solved_DNX[..., :-1], solved_DNX[..., -1]


def diagonal_kernel(a_DN: torch.Tensor, b_DN: torch.Tensor, c_DN: torch.Tensor, length: int) -> torch.Tensor:
    """K_l = 2 Re sum_n c a^l b for 0 <= l < `length`: what a unit input leaves l steps later.

    Shapes: a, b, c [D, N] complex -> [length, D] real.
    Cost: 8 D N L operations, memory for O(D (N sqrt(L) + L)) numbers.
    Reference: A Unified View of Long-Sequence Models, Sec. 7 (S4D, Vandermonde kernel).
    """
    columns = max(1, math.isqrt(max(length - 1, 0)) + 1)
    rows = -(-length // columns)
    near_DNC = powers(a_DN, columns)
    far_DNR = powers(power(a_DN, columns), max(rows, 1))[..., :rows]
    far_DRN = ((b_DN * c_DN)[..., None] * far_DNR).transpose(1, 2)
    # The real part of a complex product as one real one: [Re, -Im] . [Re; Im].
    left_DRM = torch.cat([far_DRN.real, -far_DRN.imag], dim=2)
    right_DMC = torch.cat([near_DNC.real, near_DNC.imag], dim=1)
    # Under autocast the taps would be half-precision numbers, 3e-3 beside themselves.
    with without_autocast(a_DN.device):
        taps_DT = 2 * (left_DRM @ right_DMC).flatten(1)
    return taps_DT[:, :length].T


def legs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [N, N], B [N] and P [N] in float64, with A + P P^T = -1/2 I + a skew-symmetric matrix.

    Reference: HiPPO (LegS) in the signs of S4; A Unified View of Long-Sequence Models, Sec. 7.
    """
    n = torch.arange(size, dtype=torch.float64, device="cpu")
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


def real_form(
    lambda_DN: torch.Tensor, p_DN: torch.Tensor, b_DN: torch.Tensor, c_DN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write the system over real and imaginary parts: A [D, 2 N, 2 N], b [D, 2 N], C [D, 1, 2 N].

    A state x stands for x and its conjugate, so P^* of both is 2 Re(P^* x), and the output 2 Re(C x).

    Shapes: lambda, p, b, c [D, N] complex.
    """
    real, imaginary = torch.diag_embed(lambda_DN.real), torch.diag_embed(lambda_DN.imag)
    rotation = torch.cat([torch.cat([real, -imaginary], dim=2), torch.cat([imaginary, real], dim=2)], dim=1)
    p_DM = torch.cat([p_DN.real, p_DN.imag], dim=1)
    b_DM = torch.cat([b_DN.real, b_DN.imag], dim=1)
    c_DM = 2 * torch.cat([c_DN.real, -c_DN.imag], dim=1)
    return rotation - 2 * p_DM[:, :, None] * p_DM[:, None], b_DM, c_DM[:, None]


def dplr_kernel(
    lambda_DN: torch.Tensor,
    p_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    dt_D: torch.Tensor,
    left_over_DNN: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """The taps C A^l b of the trapezoidal system for l < `length`, from its generating function at the roots of unity.

    The generating function is that of infinitely many taps; those after `length` are taken out beforehand by
    `left_over`, the real form's I - A^length. By Woodbury's identity a low-rank term costs two more sums per root.

    Shapes: lambda, p, b, c [D, N] complex, dt [D], left_over [D, 2 N, 2 N] real -> [length, D] real.
    Cost: 16 D N L operations and a transform of length L per channel.
    Reference: A Unified View of Long-Sequence Models, Sec. 7; Gu et al. 2021 (S4), Algorithm 1.
    """
    if not length:
        return lambda_DN.real.new_zeros((0, lambda_DN.shape[0]))
    pairs = c_DN.shape[1]
    c_DM = torch.cat([c_DN.real, -c_DN.imag], dim=1)
    with without_autocast(dt_D.device):
        c_DM = (c_DM[:, None] @ left_over_DNN)[:, 0]
    c_DN = torch.complex(c_DM[:, :pairs], -c_DM[:, pairs:])
    angle_F = 2 * torch.pi / length * torch.arange(length // 2 + 1, device=dt_D.device, dtype=dt_D.dtype)
    root_F = torch.polar(torch.ones_like(angle_F), -angle_F)
    # R of the reference times 1 + root has no pole at root = -1.
    gap_DF = 2 * (1 - root_F) / dt_D[:, None]

    def both(x_DN: torch.Tensor) -> torch.Tensor:
        return torch.cat([x_DN, x_DN.conj()], dim=1)

    resolvent_DMF = 1 / (gap_DF[:, None] - (1 + root_F) * both(lambda_DN)[..., None])
    sums = {
        name: torch.einsum("dm,dmf->df", both(left) * both(right), resolvent_DMF)
        for name, left, right in (
            ("cb", c_DN, b_DN),
            ("cp", c_DN, p_DN),
            ("pb", p_DN.conj(), b_DN),
            ("pp", p_DN.conj(), p_DN),
        )
    }
    low_rank_DF = (1 + root_F) * sums["cp"] * sums["pb"] / (1 + (1 + root_F) * sums["pp"])
    taps_DT: torch.Tensor = torch.fft.irfft(2 * (sums["cb"] - low_rank_DF), n=length)
    return taps_DT.T


Spectrum = Literal["lin", "inv", "real", "legs"]


def initial_eigenvalues(spectrum: Spectrum, pairs: int) -> torch.Tensor:
    """A_n for n < `pairs`, complex128 [N]: -1/2 + i pi n, its inverse law, -(n + 1), or those of HiPPO-LegS.

    Reference: S4D (Gu et al. 2022), Sec. 4; with N the size of the whole state, 2 `pairs`.
    """
    n, size = torch.arange(pairs, dtype=torch.float64, device="cpu"), 2 * pairs
    half = torch.full_like(n, -0.5)
    match spectrum:
        case "lin":
            return torch.complex(half, math.pi * n)
        case "inv":
            return torch.complex(half, size / math.pi * (size / (2 * n + 1) - 1))
        case "real":
            return torch.complex(-(n + 1), torch.zeros_like(n))
        case "legs":
            return legs_eigenvalues(size)[0]


def initial_inputs(spectrum: Spectrum, pairs: int) -> torch.Tensor:
    """B_n for n < `pairs`, float64 [N]: 1, or for `legs` |V^* B|, HiPPO's B in the eigenvectors V of A + P P^T.

    An eigenvector may be turned by any phase, which C takes up: of B only the sizes say something.

    Reference: as `initial_eigenvalues`.
    """
    if spectrum == "legs":
        return legs_eigenvalues(2 * pairs)[1].abs()
    return torch.ones(pairs, dtype=torch.float64, device="cpu")


def diagonal_kernel_naive(a_DN: torch.Tensor, b_DN: torch.Tensor, c_DN: torch.Tensor, length: int) -> torch.Tensor:
    """K_l = 2 Re sum_n c a^l b, [length, D], tap by tap; see `diagonal_kernel`."""
    taps, powers_DN = [], torch.ones_like(a_DN)
    for _ in range(length):
        taps.append(2 * (c_DN * b_DN * powers_DN).sum(1).real)
        powers_DN = powers_DN * a_DN
    return torch.stack(taps) if taps else a_DN.real.new_zeros((0, a_DN.shape[0]))

"""A state space with a full matrix in discrete time, by the generalised bilinear transform."""

import torch

__all__ = ["discretise_dense"]


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

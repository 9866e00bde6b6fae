"""One step of the LegS memory in closed form, and the transition over a stretch from its first column.

The step solves (I - A / 2t) c_t = (I + A / 2t) c_{t-1} + (B / t) f_t. With M_t = (I - A / 2t)^-1 (I + A / 2t), and
since B = -A e_0, it is c_t = c_{t-1} - F_t (c_{t-1} - e_0 f_t), F_t = I - M_t: what is remembered is forgotten towards
the constant signal f_t. A is lower triangular and semiseparable, so F_t has a closed form, without a solve and without
a difference of nearly equal numbers however large t is. A + A^T = -I - B B^T, so no M_t lengthens a vector.

All M_t are functions of one matrix and commute. A transition is then known by its first column: with
b_n = sqrt(2n + 1), e_{n+1} / b_{n+1} = -M_{(n+1)/2} e_n / b_n, and the same recurrence runs through the columns of
every transition.
"""

import torch

from dist_attn.ops.legs.state import LegsState

__all__ = ["forgetting", "legs_step", "transition_of"]


def forgetting(t: torch.Tensor, size: int) -> torch.Tensor:
    """F_t = I - M_t for the times t > 0, [...] -> [..., N, N] in float64.

    F_nn = 2 (n + 1) / d_n, and for n > m: 4 t b_n b_m / (d_n d_m) prod_{m < k < n} (2t - k) / d_k, d_n = 2t + n + 1.
    """
    n_N = torch.arange(size, dtype=torch.float64, device=t.device)
    twice = 2 * t.double()[..., None]
    d = twice + n_N + 1
    scaled = (2 * n_N + 1).sqrt() / d
    # Row n, column m: the factor of k = n - 1 where m < k, so that the running product along n has those between.
    ratio = ((twice - n_N) / d).roll(1, -1)[..., :, None]
    between = (n_N[:, None] - 1 > n_N).expand(*ratio.shape[:-1], size)
    product = torch.where(between, ratio, 1.0).cumprod(-2)
    lower = (2 * twice[..., None] * scaled[..., :, None] * scaled[..., None, :] * product).tril(-1)
    return lower + torch.diag_embed(2 * (n_N + 1) / d)


def legs_step(f_BD: torch.Tensor, state: LegsState) -> LegsState:
    """The memory after one more token.

    Shapes: f [B, D]. Cost: 2 B D N^2 operations.
    """
    forget_BNN = forgetting(state.seen_B + 1, state.c_BDN.shape[2])
    off_BDN = torch.cat([state.c_BDN[..., :1] - f_BD[..., None], state.c_BDN[..., 1:]], dim=2)
    return LegsState(state.c_BDN - off_BDN @ forget_BNN.mT, state.seen_B + 1)


def transition_of(first_RN: torch.Tensor) -> torch.Tensor:
    """The transitions [R, N, N] over some stretches of tokens, from their first columns [R, N].

    Cost: 2 R N^3 operations.
    """
    size = first_RN.shape[1]
    n_N = torch.arange(1, size, dtype=torch.float64, device=first_RN.device)
    columns = [first_RN]
    for forget_NN in forgetting(n_N / 2, size).unbind(0):
        columns.append(columns[-1] @ forget_NN.mT - columns[-1])
    scale_N = (2 * torch.arange(size, dtype=torch.float64, device=first_RN.device) + 1).sqrt()
    return torch.stack(columns, dim=2) * scale_N

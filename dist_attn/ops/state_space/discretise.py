"""A diagonal state space in discrete time: what one step of length dt does to the state and adds for an input."""

from typing import Literal

import torch

__all__ = ["Rule", "discretise"]

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

"""State spaces: discrete steps, kernels and HiPPO matrices against the golden vectors and the oracle."""

import pytest
import torch

from dist_attn.ops.state_space import (
    diagonal_kernel,
    diagonal_kernel_naive,
    discretise,
    initial_eigenvalues,
    legs,
    legs_eigenvalues,
)
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.golden import golden


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
@pytest.mark.parametrize("spectrum", ["lin", "inv", "real"])
def test_golden_s4d(spectrum, rule):
    """Eigenvalues, discrete steps and the kernel of every initialisation and rule are the golden ones."""
    g = golden("s4d")
    a_N = initial_eigenvalues(spectrum, 4)
    assert_close(a_N, g[f"A_{spectrum}"], kind="golden")
    a_DN = a_N.expand(3, 4)
    a, b = discretise(a_DN, g["B"].expand(3, 4).to(a_DN.dtype), g["dt"], rule)
    assert_close(a, g[f"{spectrum}_{rule}_Abar"], kind="golden")
    assert_close(b, g[f"{spectrum}_{rule}_Bbar"], kind="golden")
    assert_close(diagonal_kernel(a, b, g["C"], 20).T, g[f"{spectrum}_{rule}_K"], kind="golden")


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 1000])
def test_the_kernel_is_the_oracles(length):
    """At any length the taps and the gradients of a, b and c are those taken tap by tap, with a = 0 too."""
    results = []
    for form in (diagonal_kernel_naive, diagonal_kernel):
        g = torch.Generator().manual_seed(0)
        a, b, c = (torch.randn(2, 3, generator=g, dtype=torch.complex128) for _ in range(3))
        a = a / (a.abs() + 0.05)
        a[0, 0] = 0
        leaves = [t.requires_grad_() for t in (a, b, c)]
        taps_LD = form(*leaves, length)
        (weighted_sum(taps_LD) + 0 * sum(t.real.sum() for t in leaves)).backward()
        results.append([taps_LD, *(t.grad for t in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("size", [4, 8, 16])
def test_hippo(size):
    """A, B, P and the eigenvalues of A + P P^T are the golden ones; their real parts are all -1/2."""
    g = golden("hippo_legs")
    a_NN, b_N, p_N = legs(size)
    for got, name in ((a_NN, "A"), (b_N, "B"), (p_N, "P")):
        assert_close(got, g[f"{name}{size}"], kind="golden")
    values, _ = legs_eigenvalues(size)
    wanted = g[f"eig_normal{size}"]
    wanted = wanted[wanted.imag > 0]
    assert_close(values.imag.sort().values, wanted.imag.sort().values, kind="golden")
    assert torch.equal(values.real, torch.full((size // 2,), -0.5, dtype=torch.float64))


def test_small_steps_keep_their_digits():
    """With a step of 1e-9 the zero-order hold of B is dt B to the last digits, in single precision."""
    a = torch.full((1, 1), -0.5 + 3j, dtype=torch.complex64)
    _, b = discretise(a, torch.ones_like(a), torch.tensor([1e-9]), "zoh")
    assert abs(complex(b) / 1e-9 - 1) < 1e-6

"""State spaces: steps, kernels, HiPPO matrices and the scan with a full matrix against golden vectors and oracles."""

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn_papers.ops import dense_scan
from dist_attn_papers.ops.dense_space import columns_of_powers, dense_scan_naive, matrix_power
from dist_attn_papers.ops.state_space import (
    diagonal_kernel,
    diagonal_kernel_naive,
    discretise,
    discretise_dense,
    dplr_kernel,
    initial_eigenvalues,
    legs,
    legs_eigenvalues,
    real_form,
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
    values, *_ = legs_eigenvalues(size)
    wanted = g[f"eig_normal{size}"]
    wanted = wanted[wanted.imag > 0]
    assert_close(values.imag.sort().values, wanted.imag.sort().values, kind="golden")
    assert torch.equal(values.real, torch.full((size // 2,), -0.5, dtype=torch.float64))


def test_small_steps_keep_their_digits():
    """With a step of 1e-9 the zero-order hold of B is dt B to the last digits, in single precision."""
    a = torch.full((1, 1), -0.5 + 3j, dtype=torch.complex64)
    _, b = discretise(a, torch.ones_like(a), torch.tensor([1e-9]), "zoh")
    assert abs(complex(b) / 1e-9 - 1) < 1e-6


@pytest.mark.parametrize(("rule", "alpha"), [("euler", 0.0), ("bilinear", 0.5), ("backward", 1.0)])
def test_golden_lssl(rule, alpha):
    """The generalised bilinear transform, the kernel, and the scan with its last state are the golden ones."""
    g = golden("hippo_legs")
    a_DNN, b_DN = discretise_dense(g["A4"], g["B4"], g["lssl_dt"].reshape(1), alpha)
    assert_close(a_DNN[0], g[f"lssl_{rule}_Abar"], kind="golden")
    assert_close(b_DN[0], g[f"lssl_{rule}_Bbar"], kind="golden")
    assert_close((g["lssl_C"] @ columns_of_powers(a_DNN, b_DN, 16))[0], g[f"lssl_{rule}_K"], kind="golden")
    u_LD = g["lssl_u"][:, None]
    y, after = dense_scan(u_LD[None], a_DNN, b_DN, g["lssl_C"][None, None])
    assert_close(y[0, :, 0, 0] + g["lssl_D"] * g["lssl_u"], g[f"lssl_{rule}_y"], kind="golden")
    assert_close(after[0, 0], g[f"lssl_{rule}_xL"], kind="golden")


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
def test_dense_chunks_equal_the_oracle(length, given_state):
    """Outputs, final state and every gradient of the scan with a full matrix are the oracle's at any length."""
    results = []
    for form in (dense_scan_naive, dense_scan):
        g = torch.Generator().manual_seed(0)
        shapes = ((2, length, 3), (3, 4, 4), (3, 4), (3, 2, 4), (2, 3, 4))
        u, a, b, c, x = (torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes)
        y, after = form(u, 0.3 * a, b, c, state=x if given_state else None)
        loss = weighted_sum(y) + weighted_sum(after, seed=2) + 0 * sum(t.sum() for t in (u, a, b, c, x))
        loss.backward()
        results.append([y, after, *(t.grad for t in (u, a, b, c, x))])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("length", [0, 1, 2, 7, 50, 64])
def test_the_low_rank_kernel_is_that_of_its_matrix(length):
    """S4's taps by its generating function are those of powers of the full matrix, even and odd lengths."""
    lambda_DN, b_DN, p_DN = (t.expand(3, 4) for t in legs_eigenvalues(8))
    c_DN = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.complex128)
    dt_D = torch.tensor([0.01, 0.05, 0.1], dtype=torch.float64)
    a_DNN, b, c = real_form(lambda_DN, p_DN, b_DN, c_DN)
    a_DNN, b = discretise_dense(a_DNN, b, dt_D, 0.5)
    left_over = torch.eye(8, dtype=torch.float64) - matrix_power(a_DNN, length)
    got = dplr_kernel(lambda_DN, p_DN, b_DN, c_DN, dt_D, left_over, length)
    assert_close(got, (c @ columns_of_powers(a_DNN, b, length))[:, 0].T)


def test_the_low_rank_form_is_legs():
    """Over real and imaginary parts, Lambda - P P^* has the eigenvalues of LegS: -1, -2, …, -N."""
    a_DNN, *_ = real_form(
        *(t[None] for t in legs_eigenvalues(8)[::2]), *2 * (torch.zeros(1, 4, dtype=torch.complex128),)
    )
    values = torch.linalg.eigvals(a_DNN[0])
    assert_close(values.real.sort().values, -torch.arange(8.0, 0.0, -1.0, dtype=torch.float64), kind="gradient")


def test_sizes_that_do_not_fit_are_named():
    """A matrix of another size than its input, or a state of another batch, is refused with all shapes."""
    u, a, b, c = torch.zeros(2, 5, 3), torch.zeros(3, 4, 4), torch.zeros(3, 4), torch.zeros(3, 1, 4)
    with pytest.raises(ShapeError, match=r"needed are u \[B, L, D\], a \[D, N, N\]"):
        dense_scan(u, a[:, :3], b, c)
    with pytest.raises(ShapeError, match=r"needed is \[B, D, N\] = \(2, 3, 4\)"):
        dense_scan(u, a, b, c, state=torch.zeros(1, 3, 4))

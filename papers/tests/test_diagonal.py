"""The diagonal recurrence: the chunked form against the oracle and the golden vectors."""

from itertools import pairwise

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn_papers.ops import diagonal_scan, long_convolve
from dist_attn_papers.ops.diagonal import diagonal_scan_naive, power
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.sharded_call import random_tensor


def _complex(*shape: int, seed: int) -> torch.Tensor:
    return torch.complex(random_tensor(*shape, seed=seed), random_tensor(*shape, seed=seed + 100))


def _inputs(length: int) -> list[torch.Tensor]:
    """u, a inside the unit circle with one exact zero, b, c and a state."""
    a = _complex(3, 4, seed=1)
    a = a / (a.abs() + 0.05)
    a[0, 0] = 0
    return [random_tensor(2, length, 3, seed=0), a, _complex(3, 4, seed=2), _complex(3, 4, seed=3),
            _complex(2, 3, 4, seed=4)]  # fmt: skip


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200, 1200])
def test_chunks_equal_the_oracle(length, given_state):
    """Outputs, final state and every gradient are the oracle's at any length, with a decay of exactly 0 too."""
    results = []
    for form in (diagonal_scan_naive, diagonal_scan):
        u, a, b, c, x = (t.clone().requires_grad_() for t in _inputs(length))
        y, after = form(u, a, b, c, state=x if given_state else None)
        (0 * u.sum() + weighted_sum(y) + weighted_sum(torch.view_as_real(after), seed=2)).backward()
        leaves = (u, a, b, c, *((x,) if given_state else ()))
        results.append([y, after, *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("form", [diagonal_scan, diagonal_scan_naive])
def test_golden_s4d(form):
    """S4D's recurrence and its states after every segment come out, segment by segment, for all initialisations."""
    g = golden("s4d")
    u_LD = g["u"].T
    for kind in ("lin", "inv", "real"):
        for rule in ("zoh", "bilinear"):
            name = f"{kind}_{rule}"
            state, outs = None, []
            cuts = g["split"].tolist()
            for segment, (start, stop) in enumerate(pairwise(cuts)):
                y, state = form(u_LD[None, start:stop], g[f"{name}_Abar"], g[f"{name}_Bbar"], g["C"], state=state)
                outs.append(y[0])
                assert_close(state[0], g[f"{name}_state"][segment], kind="golden", what=f"{name} state {segment}")
            assert_close((torch.cat(outs) + g["D"] * u_LD).T, g[f"{name}_y_rec"], kind="golden", what=name)


def test_the_recurrence_is_a_long_convolution():
    """Its kernel is 2 Re sum_n c a^l b."""
    u, a, b, c, _ = _inputs(150)
    powers = torch.stack([power(a, exponent) for exponent in range(150)])
    kernel_LD = 2 * (c * powers * b).sum(-1).real
    assert_close(diagonal_scan(u, a, b, c)[0], long_convolve(u, kernel_LD))


def test_second_derivatives():
    """Gradients are themselves differentiable."""
    u, a, b, c, x = (t.requires_grad_() for t in _inputs(3))
    assert torch.autograd.gradgradcheck(lambda *t: diagonal_scan(*t[:4], state=t[4]), (u, a, b, c, x), fast_mode=True)


def test_single_precision_in_single_precision_out():
    """float32 inputs keep a complex64 state; half precision is summed in float32."""
    u, a, b, c, _ = _inputs(100)
    single = [u.float(), *(t.to(torch.complex64) for t in (a, b, c))]
    y, state = diagonal_scan(*single)
    want, want_state = diagonal_scan(*(t.double() if not t.is_complex() else t.to(torch.complex128) for t in single))
    assert (y.dtype, state.dtype) == (torch.float32, torch.complex64)
    assert_close(y, want.float())
    assert_close(state, want_state.to(torch.complex64))
    assert diagonal_scan(u.bfloat16(), *single[1:])[1].dtype == torch.complex64


def test_whole_powers():
    """Powers of 0, and of exponent 0, are what products give, and large ones underflow to 0 instead of NaN."""
    a = torch.tensor([[0, 0.5 + 0.5j, -1]], dtype=torch.complex128)
    assert torch.equal(power(a, 0), torch.ones_like(a))
    assert_close(power(a, 5), a * a * a * a * a)
    assert torch.equal(power(a, 10**6), torch.tensor([[0, 0, 1]], dtype=torch.complex128))


@pytest.mark.parametrize("change", [{"u": (2, 5, 4)}, {"b": (3, 5)}, {"state": (1, 3, 4)}])
def test_shapes_that_do_not_fit_are_named(change):
    """The message says which shapes are needed."""
    shapes = {"u": (2, 5, 3), "a": (3, 4), "b": (3, 4), "c": (3, 4), "state": (2, 3, 4)} | change
    u, *rest = (torch.zeros(s, dtype=torch.float32 if n == "u" else torch.complex64) for n, s in shapes.items())
    with pytest.raises(ShapeError, match="needed"):
        diagonal_scan(u, *rest[:3], state=rest[3])

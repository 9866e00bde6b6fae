"""Weights of fewer bits: how far rounding may be off, and fast products against the oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops import narrow_weights
from dist_attn.ops.narrow_weights import (
    bfloat16_linear,
    bfloat16_linear_naive,
    int8_linear,
    int8_linear_naive,
    int8_product,
    int8_step_linear,
    round_rows,
    widen_rows,
)
from tests.support.closeness import assert_close
from tests.support.examples import examples

NAN = float("nan")
INPUTS = (1, 5, 16, 24, 48, 64)  # the packed kernel takes multiples of 16 and must be kept from all others


def weights(outputs: int, inputs: int) -> torch.Tensor:
    """Rows of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(inputs)
    w_OI = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 4, outputs)[:, None]
    w_OI[outputs // 2] = 0.0
    return w_OI


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 10**6), st.floats(-30, 30), st.sampled_from([1, 2, 8]))
@examples(150)
def test_every_weight_is_at_most_half_a_scale_off(outputs, inputs, seed, exponent, power):
    """q scale is within scale / 2 of w, and a scale within 1 + 2^-7 of the row's largest number / 127, and bfloat16."""
    w_OI = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) ** power * 10.0**exponent
    q_OI, scale_O = round_rows(w_OI)
    assert (q_OI.dtype, scale_O.dtype) == (torch.int8, torch.bfloat16)
    assert int(q_OI.abs().max()) <= 127
    exact_O1 = scale_O.double()[:, None]
    assert ((q_OI * exact_O1 - w_OI.double()).abs() <= exact_O1 / 2 * (1 + 1e-6)).all()
    largest_O = w_OI.double().abs().amax(dim=1)
    normal_O = largest_O > 1e-30
    assert (exact_O1[normal_O, 0] <= largest_O[normal_O] / 127 * (1 + 2**-7) * (1 + 1e-6)).all()
    assert_close(widen_rows(q_OI, scale_O, torch.float64), q_OI * exact_O1, kind="exact")


def test_rows_of_zeros_and_of_no_inputs_have_a_form():
    """A row of zeros stays zeros; a matrix without inputs multiplies to zeros."""
    q_OI, scale_O = round_rows(torch.zeros(3, 4))
    assert not q_OI.any() and bool((scale_O > 0).all())
    nothing = round_rows(torch.zeros(3, 0))
    assert_close(int8_linear(torch.zeros(2, 0), *nothing), torch.zeros(2, 3))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 3), (16,), (17,), (40,)])
def test_fast_products_are_the_oracle_with_rounded_inputs_and_results(inputs, rows):
    """However many rows there are, x and the result are rounded to bfloat16, and the sum of a widened product too."""
    w_OI = weights(7, inputs)
    q_OI, scale_O = round_rows(w_OI)
    x = torch.randn(*rows, inputs, generator=torch.Generator().manual_seed(1))
    size = x.double().abs() @ w_OI.double().abs().T
    want = int8_linear_naive(x.double(), q_OI, scale_O)
    cases = [
        (int8_linear(x, q_OI, scale_O), want, 3),
        (bfloat16_linear(x, w_OI.bfloat16()), bfloat16_linear_naive(x.double(), w_OI.bfloat16()), 2),
    ]
    if x.dim() == 2:
        widened = int8_product(x.device, inputs, len(x)) == "widened"
        cases.append((int8_step_linear(x, q_OI, scale_O), want, 3 if widened else 2))
    for got, want, roundings in cases:
        assert got.shape == (*rows, 7) and got.dtype == torch.float32
        assert ((got.double() - want).abs() <= roundings * 2**-8 * size * (1 + 2**-6) + 1e-30).all()
        assert_close(got.bfloat16().float(), got, kind="exact")


@pytest.mark.parametrize("capable", [True, False])
def test_both_int8_products_round_the_result_after_the_scale(monkeypatch, capable):
    """With exact inputs and sums of few digits, packed and widened products have the bits of the oracle, rounded."""
    monkeypatch.setattr(narrow_weights, "_CPU_HAS_BFLOAT16", capable and narrow_weights._CPU_HAS_BFLOAT16)
    generator = torch.Generator().manual_seed(1)
    q_OI = torch.randint(-3, 4, (40, 16), generator=generator, dtype=torch.int8)
    scale_O = torch.rand(40, generator=generator).bfloat16()
    x_BI = torch.randint(-3, 4, (5, 16), generator=generator).float()  # sums are below 256, which bfloat16 holds
    want_BO = int8_linear_naive(x_BI.double(), q_OI, scale_O).bfloat16().float()
    for product in (int8_linear, int8_step_linear):
        assert_close(product(x_BI, q_OI, scale_O), want_BO, kind="exact")


@pytest.mark.parametrize("stop", [3, 10, 16, 17, 33])
def test_what_is_read_has_the_same_bits_however_it_is_cut(stop):
    """Of a slice's first rows, or last ones, the results are those of the whole slice."""
    w_OI = weights(40, 64)
    q_OI, scale_O = round_rows(w_OI)
    x_BLI = torch.randn(2, 74, 64, generator=torch.Generator().manual_seed(1))
    want_BLO = int8_linear(x_BLI, q_OI, scale_O)
    for cut in (slice(None, stop), slice(-stop, None)):
        assert_close(int8_linear(x_BLI[:, cut], q_OI, scale_O), want_BLO[:, cut], kind="exact")


def test_in_float64_nothing_is_rounded_but_the_weights():
    """Products in float64 are the oracle's to the bit."""
    w_OI = weights(7, 32)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for product in (int8_linear, int8_step_linear):
        assert_close(product(x, *round_rows(w_OI)), int8_linear_naive(x, *round_rows(w_OI)), kind="exact")
    assert_close(bfloat16_linear(x, w_OI.bfloat16()), bfloat16_linear_naive(x, w_OI.bfloat16()), kind="exact")


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_has_the_same_bits_whoever_stands_beside_it(monkeypatch, packed):
    """In a batch of eight, where a row stands and what the others hold changes no bit of it."""
    monkeypatch.setattr(narrow_weights, "PACKED_ROWS", 16 if packed else 0)
    q_OI, scale_O = round_rows(weights(40, 64))
    x_BI = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    want_BO = int8_step_linear(x_BI, q_OI, scale_O)
    for shift in range(8):
        assert_close(int8_step_linear(x_BI.roll(shift, 0), q_OI, scale_O), want_BO.roll(shift, 0), kind="exact")
    others_BI = torch.full_like(x_BI, 100.0)
    others_BI[3] = x_BI[3]
    assert_close(int8_step_linear(others_BI, q_OI, scale_O)[3], want_BO[3], kind="exact")


def test_a_machine_without_fast_products_multiplies_the_same_weights(monkeypatch):
    """Without the packed kernel and without bfloat16 instructions results differ by the rounding of sums alone."""
    q_OI, scale_O = round_rows(weights(40, 64))
    x_BI = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    want_BO = int8_step_linear(x_BI, q_OI, scale_O)
    monkeypatch.setattr(narrow_weights, "_CAPABILITY", "DEFAULT")
    monkeypatch.setattr(narrow_weights, "_CPU_HAS_BFLOAT16", False)
    assert int8_product(torch.device("cpu"), 64) == "widened"
    assert narrow_weights.bfloat16_product(torch.device("cpu")) == "float32"
    assert_close(int8_step_linear(x_BI, q_OI, scale_O).bfloat16(), want_BO.bfloat16())


def test_the_packed_kernel_gets_no_row_that_it_would_read_past():
    """Inputs that are no multiple of 16 are widened, as are those on other devices, and steps of many sequences."""
    cpu = torch.device("cpu")
    assert {int8_product(cpu, inputs) for inputs in (0, 1, 8, 24, 40)} == {"widened"}
    assert int8_product(torch.device("cuda"), 64) == "widened"
    assert int8_product(cpu, 64, narrow_weights.PACKED_ROWS + 1) == "widened"


@pytest.mark.parametrize(
    ("w", "error", "says"),
    [
        (torch.zeros(3), ShapeError, "are matrices"),
        (torch.tensor([[1.0, NAN]]), InputError, "NaN or infinite"),
        (torch.tensor([[1.0, float("inf")]]), InputError, "NaN or infinite"),
    ],
)
def test_what_has_no_form_is_refused(w, error, says):
    """What is no matrix, and numbers that are not finite, are refused in words."""
    with pytest.raises(error, match=says):
        round_rows(w)

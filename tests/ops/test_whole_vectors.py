"""Within `WholeVectors` a function of a row has the same bits in every slot, and the values that it has anywhere."""

import pytest
import torch
import torch.nn.functional as F

from dist_attn.ops.whole_vectors import WholeVectors
from tests.support.closeness import assert_close
from tests.support.pairs import each_pair

FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "sigmoid of a tensor": lambda x: x.sigmoid(),
    "silu": F.silu,
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "exp2": torch.exp2,
    "power": lambda x: x.abs() ** 1.7,
    "power of a row": lambda x: torch.pow(x.abs(), x[0].detach()),
    "power of a number": lambda x: 2.5**x,
    "logaddexp": lambda x: torch.logaddexp(x, 0.3 * x[:, :1]),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "a product": lambda x: F.linear(x, torch.arange(5.0 * x.shape[1], dtype=x.dtype).view(5, -1).sin()),
}
ROWS = {
    "few": lambda x_NH: x_NH[:, :6].contiguous(),
    "apart": lambda x_NH: x_NH[:, :6],
    "side by side": lambda x_NH: x_NH[:, :6].T.contiguous().T,
    "more than one thread takes": lambda x_NH: x_NH,
}


@pytest.fixture
def three_threads():
    """As a rank that has three cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("function", "rows", "dtype"), each_pair(FUNCTIONS, ROWS, (torch.float32, torch.bfloat16)))
def test_every_slot_has_the_same_bits(function, rows, dtype):
    """Eight equal rows stay equal, and are what the function makes of them otherwise, to rounding."""
    row_1H = 2 * torch.randn(1, 5003, generator=torch.Generator().manual_seed(5))
    x_NH = ROWS[rows](row_1H.to(dtype).expand(8, -1).contiguous())
    with WholeVectors():
        y_NH = FUNCTIONS[function](x_NH)
    assert torch.equal(y_NH, y_NH[:1].expand_as(y_NH))
    assert y_NH.shape[0] == 8
    if dtype == torch.float32:
        assert_close(y_NH, FUNCTIONS[function](x_NH.double() if function != "a product" else x_NH).float())


@pytest.mark.usefixtures("three_threads")
def test_it_tells_whether_anything_had_to_be_filled_up():
    """Rows that fill vectors, rows apart, and so few numbers that none of them is in a vector need nothing."""
    x_NH = torch.randn(8, 12)
    for function, given, needed in (
        (torch.sigmoid, x_NH, False),
        (torch.sigmoid, x_NH[:, :6], False),
        (torch.sigmoid, x_NH[:, :1].contiguous(), False),
        (torch.rsqrt, x_NH[:, :6].contiguous(), False),
        (torch.exp, x_NH[:, :6].contiguous(), False),
        (torch.sigmoid, x_NH[:, :6].contiguous(), True),
        (torch.sigmoid, torch.randn(8, 5004), True),
        (FUNCTIONS["a product"], x_NH[:, :10], True),
        (FUNCTIONS["a product"], x_NH, False),
    ):
        with WholeVectors() as whole:
            function(given)
        assert whole.needed == needed

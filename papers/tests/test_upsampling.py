"""Up-sampling of kept tokens: the fast form against the oracle and the golden vectors."""

import pytest
import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn_papers.ops.token_selection import Interpolation, upsample, upsample_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden


@pytest.mark.parametrize("neighbours", [None, 1, 3, 8])
@pytest.mark.parametrize("kept", [[0], [12], [5], [0, 12], [2, 3, 9], list(range(13)), [1, 4, 6, 7, 11]])
def test_fast_equals_oracle(kept, neighbours):
    """Values and gradients equal the oracle's at every position, with fewer tokens than neighbours too."""
    how = Interpolation() if neighbours is None else Interpolation("knn", neighbours)
    position, wanted = torch.tensor(kept), torch.arange(13)
    z = torch.randn(len(kept), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    outs = [upsample_naive(z, position, wanted, neighbours=neighbours), upsample(z, position, wanted, how)]
    weights = torch.randn(13, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weights).sum(), z)[0] for out in outs]
    assert_close(outs[1], outs[0])
    assert_close(gradients[1], gradients[0], kind="gradient")
    assert_close(outs[1][position], z, kind="exact")


@pytest.mark.parametrize(
    ("name", "how"),
    [("lin", Interpolation()), ("knn", Interpolation("knn", 3)), ("near", Interpolation("knn", 1))],
)
def test_golden_upsampling(name, how):
    """The golden values come out, on the line and from three neighbours and from one."""
    g = golden("system")
    assert_close(upsample(g["Z"], g["kept"], torch.arange(len(g["X"])), how), g[name], kind="golden")


def test_what_cannot_be_filled_is_refused():
    """No neighbours, no tokens to take values from and positions of another number are refused."""
    with pytest.raises(InputError, match="needed is 1 or more"):
        Interpolation("knn", 0)
    with pytest.raises(InputError, match="keep at least one"):
        upsample(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), torch.arange(3))
    with pytest.raises(ShapeError, match=r"needed are \[N, D\], \[N\] and \[T\]"):
        upsample(torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64), torch.arange(3))

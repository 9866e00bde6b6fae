"""Products of many rows by oneDNN are those of torch, and a row's bits depend on no other row."""

import pytest
import torch
import torch.nn.functional as F

from dist_attn.ops import onednn
from dist_attn.ops.onednn import onednn_linear, takes_onednn_linear
from dist_attn.ops.whole_vectors import RowBlocks
from tests.support.closeness import assert_close

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_rows_do_not_depend_on_each_other(bias):
    """Batches of any number of rows, also such as are not in order in memory, and any first rows of them."""
    w_OI, bias_O = torch.randn(160, 400) / 20, torch.randn(160) if bias else None
    x_BLI = torch.randn(541, 3, 400).transpose(0, 1)
    y_BLO = onednn_linear(x_BLI, w_OI, bias_O)
    want_BLO = F.linear(x_BLI.double(), w_OI.double(), None if bias_O is None else bias_O.double())
    assert_close(y_BLO, want_BLO.float())
    for rows in (16, 17, 31, 64, 541):
        assert torch.equal(onednn_linear(x_BLI[:1, :rows], w_OI, bias_O), y_BLO[:1, :rows])


@pytest.mark.parametrize(
    "w_OI", [0.05 * torch.randn(400, 160).T, (0.05 * torch.randn(3, 160, 400))[1], (0.05 * torch.randn(320, 400))[::2]]
)
@torch.inference_mode()
def test_weights_may_lie_anywhere(w_OI):
    """Weights of experts, transposed ones and every other row."""
    x_NI = torch.randn(50, 400)
    assert_close(onednn_linear(x_NI, w_OI), F.linear(x_NI, w_OI))


@pytest.mark.parametrize("bias_O", [torch.randn(160, 2)[:, 1], torch.randn(1).expand(160), torch.randn(1)])
@torch.inference_mode()
def test_biases_may_lie_anywhere(bias_O):
    """Every other number, and one for all outputs."""
    x_NI, w_OI = torch.randn(600, 400), torch.randn(160, 400) / 20
    assert_close(onednn_linear(x_NI, w_OI, bias_O), F.linear(x_NI, w_OI) + bias_O)


def test_it_takes_many_rows_for_inference_in_float32(monkeypatch):
    """Neither gradients nor autocast, blocks of rows, few rows, other types and other devices."""
    monkeypatch.setattr(onednn, "mkl_lacks_avx512", lambda: True)
    x_NI, w_OI = torch.randn(64, 256), torch.nn.Parameter(torch.randn(256, 256))
    assert not takes_onednn_linear(x_NI, w_OI)
    with torch.no_grad():
        assert takes_onednn_linear(x_NI, w_OI)
        assert not takes_onednn_linear(x_NI[:15], w_OI)
        assert not takes_onednn_linear(x_NI.bfloat16(), w_OI.bfloat16())
        assert not takes_onednn_linear(x_NI.to("meta"), w_OI.to("meta"))
        with torch.autocast("cpu", torch.bfloat16):
            assert not takes_onednn_linear(x_NI, w_OI)
        with RowBlocks():
            assert not takes_onednn_linear(x_NI, w_OI)

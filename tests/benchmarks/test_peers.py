"""Peers compute what we compute, where they are installed; those that are not say why."""

import pytest
import torch

from benchmarks import peers
from benchmarks.cases import attention_inputs
from benchmarks.peers import absent, cumulative_sums, performer, recurrence_by_chunks
from dist_attn.feature_maps import ArcCosine
from dist_attn.ops import Denominator, linear_attention
from tests.support.closeness import assert_close


def test_running_sums_are_the_same_attention() -> None:
    """The form that papers print gives what the blocked form gives."""
    (q, k, v), _ = attention_inputs(70)
    positive = ArcCosine(torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(0)))
    ours, _ = linear_attention(q, k, v, feature_map=positive)
    assert_close(cumulative_sums(positive(q), positive(k), v), ours)


@pytest.mark.skipif(
    bool(absent("flash-linear-attention")), reason=str(absent("flash-linear-attention").get("flash-linear-attention"))
)
def test_a_library_s_plain_form_gives_the_same_gated_sums() -> None:
    """flash-linear-attention's naive chunks agree with ours, gates included, without a denominator."""
    generator = torch.Generator().manual_seed(1)
    phi_q, phi_k, v = torch.randn((3, 2, 3, 70, 16), generator=generator)
    log_gate = -torch.rand((2, 3, 70), generator=generator)
    ours, _ = linear_attention(phi_q, phi_k, v, log_gate_BHS=log_gate, denominator=Denominator("one"))
    assert_close(recurrence_by_chunks(phi_q, phi_k, v, log_gate), ours)


@pytest.mark.skipif(bool(absent("performer-pytorch")), reason=str(absent("performer-pytorch").get("performer-pytorch")))
def test_a_library_s_performer_is_causal() -> None:
    """performer-pytorch gives outputs of our shape in which no token sees a later one."""
    torch.manual_seed(0)
    attend, (q, k, v) = performer(16, 32), torch.randn(3, 1, 2, 12, 16)
    with torch.no_grad():
        whole, first = attend(q, k, v), attend(q[:, :, :5], k[:, :, :5], v[:, :, :5])
    assert whole.shape == v.shape
    assert torch.isfinite(whole).all()
    # Its features are scaled by a maximum over all keys, which cancels but for a small constant.
    torch.testing.assert_close(whole[:, :, :5], first, rtol=0.05, atol=0.05)


def test_a_peer_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library, one whose own needs are missing, and one that breaks are told apart in words."""
    modules = {"gone": "no_such_library.part", "broken": "json.no_such_part", "there": "json"}
    monkeypatch.setattr(peers, "MODULES", modules)
    peers._load.cache_clear()
    try:
        found = absent(*modules)
    finally:
        peers._load.cache_clear()
    assert found.keys() == {"gone", "broken"}
    assert found["gone"] == peers.INSTALL

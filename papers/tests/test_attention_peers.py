"""Other forms of attention compute what we compute, where they are installed."""

import pytest
import torch

from benchmarks.cases import OURS, attention_inputs
from benchmarks.peers import absent
from benchmarks.timing import RATES
from dist_attn.feature_maps import ArcCosine
from dist_attn.ops import Denominator, linear_attention
from dist_attn_papers.studies.attention_peers import CASES, performer
from dist_attn_papers.tables import scaleformer_works
from dist_attn_papers.tables.printed_attention import cumulative_sums, printed_kernel, printed_positions
from dist_attn_papers.tables.scaleformer_figures import works
from tests.support.closeness import assert_close
from tests.support.sharded_call import random_tensor


@pytest.mark.parametrize("name", CASES)
def test_cases_compare_like_with_like(name: str) -> None:
    """Ours and every other form return outputs of the same shape."""
    found = {form: work() for form, work in CASES[name].works(24).items() if form not in RATES}
    assert len(found) >= 2
    assert {one.shape for one in found.values() if isinstance(one, torch.Tensor)} == {(1, 8, 24, 64)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [5, 16, 40, 150])
def test_scaleformers_algorithms_are_the_same_sums(length: int, causal: bool) -> None:
    """As printed they give what the quadratic forms give, at lengths below and above k too."""
    q, k, v = (random_tensor(2, 1, length, scaleformer_works.SIZE, seed=s) for s in range(3))
    rp = random_tensor(1, 2 * scaleformer_works.REACH + 1, scaleformer_works.SIZE, seed=3)
    assert_close(printed_positions(q, v, rp, causal), scaleformer_works.naive_positions(q, v, rp, causal))
    assert_close(printed_kernel(q, k, v, causal), scaleformer_works.naive_kernel(q, k, v, causal))


def test_algorithms_that_need_too_much_are_left_out() -> None:
    """At 65,536 tokens windows of values are missing, and from 16,384 on the running sum of outer products."""
    assert "printed" not in works("scaleformer-4-bidirectional", 1 << 16)
    assert works("scaleformer-5-masked", 1 << 14).keys() == {OURS, *RATES}
    assert works("scaleformer-5-masked", 1 << 13).keys() == {OURS, "naive", "printed", *RATES}


def test_running_sums_are_the_same_attention() -> None:
    """The form that papers print gives what the blocked form gives."""
    (q, k, v), _ = attention_inputs(70)
    positive = ArcCosine(torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(0)))
    ours, _ = linear_attention(q, k, v, feature_map=positive)
    assert_close(cumulative_sums(positive(q), positive(k), v), ours)


def _by_chunks(
    phi_q_BHLM: torch.Tensor, phi_k_BHLM: torch.Tensor, v_BHLV: torch.Tensor, log_gate_BHL: torch.Tensor
) -> torch.Tensor:
    """flash-linear-attention's naive form of scalar-gated linear attention, without a denominator."""
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla

    given = (t.transpose(1, 2) for t in (phi_q_BHLM, phi_k_BHLM, v_BHLV, log_gate_BHL))
    out_BLHV: torch.Tensor = naive_chunk_simple_gla(*given, scale=1.0)[0]
    return out_BLHV.transpose(1, 2)


@pytest.mark.skipif(
    bool(absent("flash-linear-attention")), reason=str(absent("flash-linear-attention").get("flash-linear-attention"))
)
def test_a_library_s_plain_form_gives_the_same_gated_sums() -> None:
    """flash-linear-attention's naive chunks agree with ours, gates included, without a denominator."""
    generator = torch.Generator().manual_seed(1)
    phi_q, phi_k, v = torch.randn((3, 2, 3, 70, 16), generator=generator)
    log_gate = -torch.rand((2, 3, 70), generator=generator)
    ours, _ = linear_attention(phi_q, phi_k, v, log_gate_BHS=log_gate, denominator=Denominator("one"))
    assert_close(_by_chunks(phi_q, phi_k, v, log_gate), ours)


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

"""bfloat16 queries, keys and values by the C kernels: products may be of bfloat16 instructions, sums are float32."""

from importlib import import_module

import pytest
import torch

from dist_attn.commands.probe import ProbeSettings, check_kernels
from dist_attn.ops import Denominator, absorb_keys, linear_attention
from dist_attn.ops.linear_attention import half_products
from tests.ops.test_native_forms import absorbed, in_two_parts, naive_absorbed
from tests.support.native import Case, assert_like_the_oracle, assert_near_in_halves, by_kernels, needs_kernels

pytestmark = needs_kernels

BF16 = torch.bfloat16


def in_half(case):
    """The same with q, k and v in bfloat16."""
    for name in "qkv":
        case.sequence[name] = case.sequence[name].to(BF16)
    return case


@pytest.mark.parametrize("tokens", [1, 2, 15, 17, 48, 63, 64, 65, 200])
@pytest.mark.parametrize("gate", [False, True])
def test_every_length(tokens, gate):
    """Lengths around pairs, vectors and chunks, from a state, are the oracle's but for the rounding of a product."""
    case = Case(tokens, kind="gaussian_unit", gate=gate, scale=gate, state=True, batch=1)
    assert_like_the_oracle(case, dtype=BF16, denominator=Denominator("mass"))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 40, 3), (40, 65, 1), (65, 3, 40), (16, 64, 65)], ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "arc_cosine", "elu"])
def test_sizes_that_are_no_pairs(sizes, kind):
    """An odd number of features or values, one alone included, leaves nothing out and adds nothing."""
    case = Case(37, kind=kind, gate=True, scale=True, state=True, sizes=sizes, batch=1)
    # Outputs that nothing divides are sums in the hundreds, of which some elements are near 0.
    assert_like_the_oracle(case, dtype=BF16, denominator=Denominator("one"), together=True)


@pytest.mark.parametrize("documents", [(0, 1, 2), (5, 6, 70, 134), (63, 65, 129)], ids=str)
def test_documents(documents):
    """Packed documents of odd lengths do not see each other."""
    case = Case(135, gate=True, scale=True, state=True, batch=1)
    # What a document of one token has as the gradient of its scale is nothing but rounding.
    assert_like_the_oracle(case, dtype=BF16, documents=documents, together=True)


@pytest.mark.parametrize("gate", [False, True])
def test_absorbed_keys_and_completed_sums(gate):
    """Keys alone, and sums that are completed later, give what attention in one piece gives."""
    assert_like_the_oracle(Case(100, gate=gate), dtype=BF16, oracle=naive_absorbed, kernels=absorbed)
    case = Case(100, kind="gaussian_unit", gate=gate, state=True)
    assert_like_the_oracle(case, dtype=BF16, kernels=in_two_parts, denominator=Denominator("mass"))


def test_a_state_is_the_same_bits_whether_anybody_asks():
    """The state that keys leave does not depend on whether outputs were wanted beside it."""
    args, kwargs = in_half(case := Case(150, gate=True, state=True)).arguments({**case.sequence, **case.shared})
    _, after = by_kernels(*args, **kwargs)
    alone = absorb_keys(*args[1:], **kwargs, implementation="native")
    assert all(torch.equal(a, b) for a, b in zip(after.tensors(), alone.tensors(), strict=True))


def test_packing_changes_no_bit():
    """A document in a packed row has the outputs, bit for bit, that it has alone."""
    args, kwargs = in_half(case := Case(200, gate=True, batch=1)).arguments({**case.sequence, **case.shared})
    gates = kwargs.pop("log_gate_BHS")
    packed, _ = by_kernels(*args, **kwargs, log_gate_BHS=gates, documents=(0, 37, 150))
    for start, stop in ((0, 37), (37, 150), (150, 200)):
        part = [x[:, :, start:stop] for x in args]
        alone, _ = by_kernels(*part, **kwargs, log_gate_BHS=gates[:, :, start:stop])
        assert torch.equal(packed[:, :, start:stop], alone)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_wrong_shows_from_there_on(name, wrong):
    """NaN and infinity are lost by no rounding: they show behind their chunk, and nothing before it is touched."""
    args, kwargs = in_half(case := Case(200, kind="elu")).arguments({**case.sequence, **case.shared})
    want, _ = by_kernels(*args, **kwargs)
    args["qkv".index(name)][0, 0, 70, 0] = wrong
    got, _ = by_kernels(*args, **kwargs)
    assert torch.equal(got[0, 0, :64], want[0, 0, :64]) and torch.equal(got[1], want[1])
    touched = got[0, 0, 70:71] if name == "q" else got[0, 0, 70:]
    assert not bool(touched.isfinite().all(dim=-1).any())


def test_the_error_does_not_grow_with_the_length():
    """After a hundred thousand tokens outputs and state are as near as after the first thousand: sums are float32."""
    case = Case(100_000, kind="gaussian_unit", sizes=(16, 16, 16), batch=1, heads=1)
    args, kwargs = in_half(case).arguments({**case.sequence, **case.shared})
    got, after = by_kernels(*args, **kwargs)
    want, want_after = linear_attention(*(x.float() for x in args), **kwargs, implementation="streaming")
    assert_near_in_halves(got[:, :, :1000], want[:, :, :1000], kind="output")
    assert_near_in_halves(got[:, :, -1000:], want[:, :, -1000:], kind="output")
    assert_near_in_halves(after.s_BHMV, want_after.s_BHMV, kind="state")
    assert torch.allclose(after.z_BHM, want_after.z_BHM, rtol=1e-4)


def test_instructions_of_the_processor_are_used():
    """Where the processor multiplies bfloat16, states are not those of the same numbers in float32; else to the bit."""
    args, kwargs = in_half(case := Case(100, kind="gaussian_unit")).arguments({**case.sequence, **case.shared})
    _, after = by_kernels(*args, **kwargs)
    _, wide = by_kernels(*(x.float() for x in args), **kwargs)
    assert torch.equal(after.s_BHMV, wide.s_BHMV) != half_products()


@pytest.mark.parametrize(("there", "words"), [(True, "its bfloat16 instructions"), (False, "float32 instructions")])
def test_doctor_tells_of_them(there, words, monkeypatch):
    """The check of kernels says which instructions bfloat16 tensors are multiplied by."""
    # The package, which has the name of a function.
    package = import_module("dist_attn.ops.linear_attention")
    monkeypatch.setattr(package, "half_products", lambda: there)
    found = check_kernels(ProbeSettings(rank=0, folder=""))
    assert found.status == "ok" and words in found.detail

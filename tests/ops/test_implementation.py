"""Which implementation of linear attention is taken, and what is said of it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn import feature_maps
from dist_attn.errors import ConfigError, ShapeError
from dist_attn.ops import LinearState, linear_attention
from dist_attn.ops.fla_known import Surroundings
from dist_attn.ops.gpu_record import GpuRecord
from dist_attn.ops.linear_attention import LinearCall, choose, implementation
from tests.support.closeness import assert_close
from tests.support.machines import Machine
from tests.support.native import needs_kernels

X = torch.zeros(1, 2, 3, 4)


class Other(torch.Tensor):
    """A tensor that is more than its memory."""


def test_tensors_of_the_cpu_take_its_kernels(computed_by):
    """By default, tensors of the CPU go to C kernels, without a compiler to the streaming form; the reason is said."""
    choice = choose(LinearCall(X, X, X))
    assert choice.implementation == computed_by
    assert (
        choice.reason
        == {
            "native": "the tensors are on a CPU",
            "streaming": "there is no C compiler, says a test",
        }[computed_by]
    )
    assert choose(LinearCall(X, X, X, implementation="streaming")).reason == "asked for by name"


def _call_of(given):
    """The precision of sums that is asked for, and a call with these fields."""
    fields = {"q_BHLK": X, "k_BHSK": X, "v_BHSV": X, **given}
    return fields.pop("sums", torch.float32), LinearCall(**fields)


NOT_NATIVE = [
    ({"causal": False, "documents": (1,)}, "not causal and there are several documents"),
    ({"prefix": 2}, "prefix"),
    ({"sums": torch.float64}, "sums in torch.float64"),
    ({"q_BHLK": X.double()}, "torch.float64"),
    ({"q_BHLK": X.half(), "k_BHSK": X.half(), "v_BHSV": X.half()}, "take one of float32, bfloat16"),
    ({"state": LinearState.identity(1, 2, 4, 4, dtype=torch.float64)}, "sums are float32"),
    ({"feature_map": feature_maps.Positive(torch.zeros(2, 5, 4))}, "do not know the feature map Positive"),
    ({"feature_map": feature_maps.Gaussian(torch.zeros(2, 1025, 4))}, "take 1 to 1024"),
    ({"feature_map": feature_maps.Gaussian(torch.zeros(3, 5, 4))}, "take \\[2, projections, 4\\]"),
    ({"v_BHSV": X[..., :0]}, "take 1 to 1024"),
    ({"q_BHLK": X[:, :, :0], "k_BHSK": X[:, :, :0], "v_BHSV": X[:, :, :0]}, "no tokens"),
    ({"q_BHLK": X[:0], "k_BHSK": X[:0], "v_BHSV": X[:0]}, "no tokens"),
    ({"q_BHLK": X.to("meta"), "k_BHSK": X.to("meta"), "v_BHSV": X.to("meta")}, "the tensors are on meta"),
    ({"v_BHSV": X.as_subclass(Other)}, "there is a Other"),
]


@needs_kernels
@pytest.mark.parametrize(("given", "words"), NOT_NATIVE, ids=range(len(NOT_NATIVE)))
def test_what_c_kernels_cannot_take_streams_or_is_an_error(given, words):
    """What C kernels cannot take goes to the streaming form by itself, and asked for by name is refused in words."""
    sums, call = _call_of(given)
    assert choose(call, sums=sums).implementation == "streaming"
    with pytest.raises(ConfigError, match=words):
        choose(replace(call, implementation="native"), sums=sums)


@needs_kernels
@pytest.mark.parametrize("documents", [(), (40,)])
def test_the_streaming_form_by_name_calls_no_kernels(documents, kernel_calls):
    """Asked for by name it computes every part itself, also inside packed documents that see all of themselves."""
    x = torch.ones(1, 1, 300, 4, requires_grad=True)
    for causal in (True, False):
        out, _ = linear_attention(x, x, x, causal=causal, documents=documents, implementation="streaming")
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        first.sum().backward()
    assert not kernel_calls
    linear_attention(x, x, x, causal=False, documents=documents)
    assert kernel_calls


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"causal": False, "documents": (1,)}, "not causal and there are several documents"),
        ({"prefix": 2}, "prefix"),
        ({"sums": torch.float64}, "sums in torch.float64"),
        ({"q_BHLK": X[:, :, :2]}, "2 queries and 3 keys"),
        ({"q_BHLK": X.double()}, "torch.float64"),
        ({"state": LinearState.identity(1, 2, 4, 4, dtype=torch.float64)}, "sums are float32"),
        ({"feature_map": feature_maps.Positive(torch.zeros(2, 5, 4))}, "do not know the feature map Positive"),
        ({"feature_map": feature_maps.Gaussian(torch.zeros(2, 257, 4))}, "take 1 to 256"),
        ({"q_BHLK": X[:, :, :0], "k_BHSK": X[:, :, :0], "v_BHSV": X[:, :, :0]}, "no tokens"),
    ],
)
def test_what_kernels_cannot_take_is_an_error_that_says_why(given, words, monkeypatch):
    """Kernels asked for by name are never replaced silently: the error names what stands against them."""
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sums, call = _call_of(given)
    with pytest.raises(ConfigError, match=words):
        choose(replace(call, implementation="triton"), sums=sums)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"causal": False}, "not causal: flash-linear-attention's kernels are"),
        ({"prefix": 2}, "prefix"),
        ({"sums": torch.float64}, "sums in torch.float64"),
        ({"q_BHLK": X[:, :, :2]}, "2 queries and 3 keys"),
        ({"q_BHLK": X.half(), "k_BHSK": X.half(), "v_BHSV": X.half()}, "take one of float32, bfloat16"),
        ({"state": LinearState.identity(1, 2, 4, 4, dtype=torch.float64)}, "sums are float32"),
        ({"q_BHLK": X[:, :, :0], "k_BHSK": X[:, :, :0], "v_BHSV": X[:, :, :0]}, "no tokens"),
    ],
)
def test_what_flash_linear_attention_cannot_take_is_an_error_that_says_why(given, words, monkeypatch):
    """By name it is refused in words too, also where it is not installed; any feature map and size will do."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(implementation, "find_spec", lambda name: object())
    monkeypatch.setattr(implementation, "surroundings_of", lambda device: Surroundings("3.7.1", "0.6.0", None))
    sums, call = _call_of(given)
    call = replace(call, implementation="fla")
    with pytest.raises(ConfigError, match=words):
        choose(call, sums=sums)
    fine = replace(_call_of({})[1], implementation="fla", feature_map=feature_maps.Positive(torch.zeros(2, 300, 4)))
    assert choose(fine).implementation == "fla"
    monkeypatch.setattr(implementation, "find_spec", lambda name: None if name == "fla" else object())
    with pytest.raises(ConfigError, match=r"is not installed; .*\[fla\]"):
        choose(fine)


def test_what_is_known_against_flash_linear_attention_is_said_by_name():
    """Gradients that a version of Triton gets wrong on a GPU are refused in words; what is right there is computed."""
    with Machine((9, 0), "3.6.0", "0.6.0").entered():
        x = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16, device="cuda")
        call = LinearCall(x, x, x.requires_grad_(), torch.zeros(1, 2, 3, device="cuda"), implementation="fla")
        with pytest.raises(ConfigError, match=r"on Hopper GPUs Triton 3\.6\.0 gets gradients"):
            choose(call)
        assert choose(replace(call, log_gate_BHS=None)).implementation == "fla"
        with torch.no_grad():
            assert choose(call).implementation == "fla"


CASES = [
    f"{dtype} {work}{gated}"
    for dtype in ("float32", "bfloat16")
    for work in ("forward", "forward and backward", "step")
    for gated in ("", " gated")
]
MILLISECONDS = st.floats(0.01, 100.0)


@given(
    times=st.dictionaries(st.sampled_from(CASES), st.tuples(MILLISECONDS, MILLISECONDS)),
    right=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tokens=st.sampled_from([1, 3]),
    gated=st.booleans(),
    gradients=st.booleans(),
)
def test_the_faster_one_is_chosen_by_record_and_call_alone(times, right, dtype, tokens, gated, gradients):
    """Times of this very case decide, by more than a tenth, where results were right; products of float32 never are."""
    ratios = {case: {"ours_ms": ours, "fla_ms": theirs} for case, (ours, theirs) in times.items()}
    kernels = {"fla causal": 1e-3 if right else "errors of 2", "linear causal": "errors of 3"}
    record = GpuRecord(driver="570", torch="2.13", triton="3.7", commit="abc", kernels=kernels, ratios=ratios)
    x = torch.zeros(1, 2, tokens, 4, dtype=dtype, requires_grad=gradients)
    call = LinearCall(x, x, x, torch.zeros(1, 2, tokens) if gated else None)
    work = "step" if tokens == 1 else "forward and backward" if gradients else "forward"
    ours, theirs = times.get(f"{str(dtype).removeprefix('torch.')} {work}{' gated' if gated else ''}", (1.0, 1.0))
    taken = right and ours > 1.1 * theirs and (tokens == 1 or dtype == torch.bfloat16)
    reason = implementation.why_not_faster(call, "X", record)
    assert (reason is None) == taken
    assert implementation.why_not_faster(call, "X", record) == reason
    assert "not seen to be faster on X" in (implementation.why_not_faster(call.tokens(0, 1), "X", None) or "")


def test_kernels_asked_for_without_a_gpu(monkeypatch):
    """Without a GPU and without the interpreter a request for kernels is refused, as is one for what does not exist."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="kernels need a GPU"):
        linear_attention(X, X, X, implementation="triton")
    with pytest.raises(ConfigError, match="'cuda' is unknown"):
        linear_attention(X, X, X, implementation="cuda")


def test_kernels_through_the_public_function():
    """`linear_attention` by name of the kernels is the streaming form's function, and a wrong state is refused."""
    pytest.importorskip("triton", reason="needs triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 3, generator=generator) for _ in range(3))
    w = torch.randn(1, 4, 3, generator=generator)
    want, _ = linear_attention(
        q, k, v, feature_map=feature_maps.Gaussian(w), documents=(2,), implementation="streaming"
    )
    q, k, v, w = (t.to(device) for t in (q, k, v, w))
    given = {"feature_map": feature_maps.Gaussian(w), "implementation": "triton"}
    got, _ = linear_attention(q, k, v, documents=(2,), **given)
    assert_close(got.cpu(), want)
    with pytest.raises(ShapeError, match="the state is"):
        linear_attention(q, k, v, state=LinearState.identity(1, 1, 7, 3, device=device), **given)

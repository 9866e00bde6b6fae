"""GPU kernels of relative attention against the oracle; without a GPU in Triton's interpreter, at small sizes."""

from pathlib import Path

import pytest
import torch

from dist_attn.errors import ConfigError, ShapeError
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.linear_attention.triton_tiles import Tiles
from dist_attn_papers.ops.relative_attention import (
    RelativeCall,
    RelativeState,
    choose_relative,
    relative_attention,
    relative_attention_naive,
    relative_attention_streaming,
)
from tests.support.closeness import assert_close

pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")

from benchmarks.gpu.cases import Shape
from dist_attn_papers.gpu.relative_check import relative_case
from dist_attn_papers.ops.relative_attention import triton as kernels

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The smallest that matrix units take: a few tokens are several chunks, and a few columns several blocks.
SMALL = Tiles(chunk=16, block_d=16, block_v=16)


def causal_or_full(q, k, v, rp, *, causal):
    """Attention by the kernels, with small tiles."""
    return kernels.triton_relative_attention(RelativeCall(q, k, v, rp, causal), tiles=SMALL)


def stream(q, k, v, rp, state):
    """The streaming form by the kernels, with small tiles."""
    return kernels.triton_relative_attention_streaming(RelativeCall(q, k, v, rp, state=state), tiles=SMALL)


def inputs(queries, keys, reach, size=5, values=4):
    """phi_q, phi_k, v and phi_rp of one batch element and two heads, features positive."""
    generator = torch.Generator().manual_seed(0)
    q, k, rp = (
        torch.rand(shape, generator=generator) + 0.1
        for shape in ((1, 2, queries, size), (1, 2, keys, size), (2, 2 * reach + 1, size))
    )
    return [q, k, torch.randn(1, 2, keys, values, generator=generator), rp]


def assert_like_the_oracle(given, *, causal, dtypes=(torch.float32,) * 4):
    """Output and gradients of the kernels on inputs of these types equal those of the oracle in float64."""
    given = [x.to(dtype) for x, dtype in zip(given, dtypes, strict=True)]
    found = []
    by_kernels = causal_or_full
    for attention, cast in ((relative_attention_naive, torch.Tensor.double), (by_kernels, lambda x: x.to(DEVICE))):
        leaves = [cast(x).detach().clone().requires_grad_() for x in given]
        out = attention(*leaves, causal=causal)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (out.double().cpu() * weight).sum().backward()
        found.append((out, [leaf.grad for leaf in leaves]))
    (want, want_grads), (got, got_grads) = found
    assert got.dtype == dtypes[2]
    assert_close(got.cpu(), want.to(dtypes[2]))
    for name, dtype, ours, exact in zip(("q", "k", "v", "rp"), dtypes, got_grads, want_grads, strict=True):
        assert ours.dtype == dtype
        assert_close(ours.cpu(), exact.to(dtype), kind="gradient", what=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "reach"), [(37, 37, 3), (17, 17, 0), (19, 50, 20), (50, 20, 17), (16, 1, 40)]
)
def test_kernels_equal_the_oracle(queries, keys, reach, causal):
    """Output and every gradient equal the oracle's for any lengths and any k, 0 and longer than a chunk too."""
    assert_like_the_oracle(inputs(queries, keys, reach), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_several_blocks(causal):
    """Features, values and rows of more than one tile, none a multiple of it, equal the oracle's."""
    assert_like_the_oracle(inputs(19, 19, 18, size=21, values=18), causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """bf16 and fp16 inputs come within their own precision of the oracle on the same inputs."""
    assert_like_the_oracle(inputs(35, 35, 5), causal=True, dtypes=(dtype,) * 4)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_have_the_precision_of_values(causal):
    """Values of float32 are summed as such where queries and keys are bf16: output and gradients have its precision."""
    bf16, f32 = torch.bfloat16, torch.float32
    assert_like_the_oracle(inputs(35, 35, 5), causal=causal, dtypes=(bf16, bf16, f32, f32))


def test_gradients_of_positions_that_nearly_cancel():
    """At k = 0 all pairs share a row of phi_rp, whose gradient in bfloat16 is as near as those of the other inputs."""
    row = relative_case("causal", torch.bfloat16, Shape(1, 1, 64, 64, 64), 130, 70, 0)
    assert row["right"], row


def test_no_weight_on_any_key_gives_zeros():
    """Queries whose features are all 0 have the output 0 and no gradient, and nothing is NaN."""
    given = [x.to(DEVICE).requires_grad_() for x in inputs(20, 20, 2)]
    silent = torch.ones_like(given[0])
    silent[:, :, 2] = 0
    out = causal_or_full(given[0] * silent, *given[1:], causal=True)
    out.square().sum().backward()
    assert not out[:, :, 2].any()
    assert not given[0].grad[:, :, 2].any()
    assert all(bool(x.grad.isfinite().all()) for x in given)


@pytest.mark.parametrize(("cuts", "reach"), [((3, 20), 5), ((20, 1), 20)])
def test_a_stream_goes_on_as_in_torch(cuts, reach):
    """Blocks with the state passed on give torch's outputs, final state, and all gradients back to the first block."""
    found = []
    by_kernels = stream
    for streaming, device in ((relative_attention_streaming, "cpu"), (by_kernels, DEVICE)):
        leaves = [x.to(device).requires_grad_() for x in inputs(sum(cuts), sum(cuts), reach)]
        state, outs = None, []
        for part in zip(*(t.split(cuts, dim=2) for t in leaves[:3]), strict=True):
            out, state = streaming(*part, leaves[3], state)
            outs.append(out)
        sz, near, far = state.sz_BHMW, state.window.near_BHTW, state.window.far_BHW
        total = torch.cat(outs, 2).square().sum() + sum((t * t.detach().cos()).sum() for t in (sz, near, far))
        total.backward()
        assert state.window.length == sum(cuts)
        found.append([t.cpu() for t in (*outs, sz, near, far, *(leaf.grad for leaf in leaves))])
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives(causal):
    """A backward pass that is differentiated again gives the windowed form's second derivatives."""
    found = []
    by_kernels = causal_or_full
    for attention, device in ((relative_attention, "cpu"), (by_kernels, DEVICE)):
        q, *others = (x.to(device) for x in inputs(6, 6, 2))
        leaf = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(attention(leaf, *others, causal=causal).square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        found.append(second.cpu())
    assert_close(found[1], found[0], kind="gradient")


def test_kernels_by_name_through_the_operations(monkeypatch):
    """`LocalSequenceOps` takes them for both forms of the call, and the choice says why it was made."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = inputs(9, 9, 2)
    ops = LocalSequenceOps(implementation="triton")
    want = relative_attention(*given, causal=True)
    moved = [x.to(DEVICE) for x in given]
    assert_close(relative_attention(*moved, causal=True, ops=ops).cpu(), want)
    state = RelativeState.identity(1, 2, 5, 4, 2)
    if DEVICE == "cpu":
        assert_close(relative_attention_streaming(*moved, state, ops=ops)[0].cpu(), want)
        assert "on cpu" in choose_relative(RelativeCall(*given)).reason
    assert choose_relative(RelativeCall(*moved, implementation="triton")).reason == "asked for by name"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": "naive"}, "the form 'naive'"),
        ({"documents": (0,)}, "several documents"),
        ({"phi_q_BHLK": torch.zeros(1, 2, 0, 5)}, "no tokens"),
        ({"v_BHSV": torch.zeros(1, 2, 3, 4, dtype=torch.float64)}, "torch.float64"),
        ({"state": RelativeState.identity(1, 2, 5, 4, 1, dtype=torch.float64)}, "sums are float32"),
    ],
)
def test_what_kernels_cannot_take_is_an_error_that_says_why(change, words, monkeypatch):
    """Kernels asked for by name are never replaced silently: the error names what stands against them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ("phi_q_BHLK", "phi_k_BHSK", "v_BHSV", "phi_rp_HRK")
    with pytest.raises(ConfigError, match=words):
        choose_relative(
            RelativeCall(**(dict(zip(names, inputs(3, 3, 1), strict=True)) | change), implementation="triton")
        )


def test_a_state_of_another_window_is_refused():
    """A state whose window is not that of the positions is refused in words."""
    given = [x.to(DEVICE) for x in inputs(3, 3, 2)]
    with pytest.raises(ShapeError, match="window"):
        relative_attention_streaming(*given, RelativeState.identity(1, 2, 5, 4, 7), implementation="triton")


def test_kernels_add_in_one_order():
    """No kernel adds atomically, which would leave the order of sums open."""
    sources = list(Path(kernels.__file__).parent.glob("triton*.py"))
    assert len(sources) >= 4
    assert not any("atomic" in path.read_text() for path in sources)

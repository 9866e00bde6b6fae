"""GPU kernels of linear attention against the oracle; without a GPU in Triton's interpreter, at small sizes."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.errors import ConfigError
from dist_attn.ops import Denominator, LinearState, Watch, linear_attention, linear_attention_step, watching
from dist_attn.ops.linear_attention import LinearCall, linear_attention_naive
from dist_attn.ops.state import steps_in_place
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close

triton = pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")

import triton.language as tl  # noqa: E402

from benchmarks.gpu.cases import Shape  # noqa: E402
from dist_attn.ops.linear_attention import triton as kernels  # noqa: E402
from dist_attn.ops.linear_attention import triton_forward as forward  # noqa: E402
from dist_attn.ops.linear_attention.triton_features import sine_and_cosine  # noqa: E402
from dist_attn.ops.linear_attention.triton_tiles import Tiles  # noqa: E402
from tests.gpu.kernel_cases import linear_case  # noqa: E402

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The smallest that matrix units take: a few tokens are several chunks, and a few columns several blocks.
SMALL = Tiles(chunk=16, block_d=16, block_v=16)


def by_kernels(q, k, v, *, tiles=SMALL, **options):
    """`linear_attention` by the kernels, with small tiles, on the device that there is."""
    return kernels.triton_linear_attention(LinearCall(q, k, v, **options), tiles=tiles)


def moved(value):
    """A tensor, state or map on the device that there is."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, LinearState):
        return LinearState(*(t.to(DEVICE) for t in value.tensors()))
    if isinstance(value, feature_maps.Gaussian | feature_maps.ArcCosine):
        return value.with_tensors(*(t.to(DEVICE) for t in value.tensors()))
    return value


def few(tokens, *, gate, scale, state):
    """Random inputs of one batch element and two heads: the interpreter takes milliseconds for every small product."""
    inputs = Inputs.random(tokens, tokens, gate=gate, scale=scale, state=state, dtype=torch.float32)
    replicated = {name: t[:2] if name == "w" else t[:1, :2] for name, t in inputs.replicated.items()}
    return Inputs({name: t[:1, :2] for name, t in inputs.sequence.items()}, replicated)


def assert_like_the_oracle(inputs, *, dtype=torch.float32, maps=lambda phi: phi, tiles=SMALL, **options):
    """Output, state and gradients of the kernels on q, k and v of `dtype` equal those of the oracle in float64."""
    rounded = {name: t.to(dtype) if name in "qkv" else t for name, t in inputs.sequence.items()}
    found = []
    for attention, cast in ((linear_attention_naive, torch.Tensor.double), (partial(by_kernels, tiles=tiles), moved)):
        sequence, replicated = (
            {name: cast(t).detach().requires_grad_() for name, t in part.items()}
            for part in (rounded, inputs.replicated)
        )
        leaves = Inputs(sequence, replicated)
        args, kwargs = leaves.arguments()
        kwargs["feature_map"] = maps(kwargs["feature_map"])
        out, after = attention(*args, **kwargs, **options)
        weighted_sum(out.cpu(), *(t.cpu() for t in after.tensors()[:4])).backward()
        found.append((out, after, leaves.gradients()))
    (want, want_state, want_grads), (got, got_state, got_grads) = found
    assert got.dtype == dtype
    assert_close(got.cpu(), want.to(dtype))
    assert torch.equal(got_state.reset_BH.cpu(), want_state.reset_BH)
    for got_field, want_field in zip(got_state.tensors()[:4], want_state.tensors()[:4], strict=True):
        assert got_field.dtype == torch.float32
        # Sums in float32 of tiles that were rounded to `dtype`.
        assert_close(got_field.cpu().to(dtype), want_field.to(dtype), kind="state")
    for name, gradient in want_grads.items():
        assert_close(got_grads[name].cpu().to(dtype), gradient.to(dtype), kind="gradient", what=name)


CASES = [
    # tokens, gate, scale, state
    (1, True, True, True),
    (16, False, False, False),
    (37, True, True, True),
    (18, True, False, False),
    (30, False, True, True),
]


@pytest.mark.parametrize(("tokens", "gate", "scale", "state"), CASES)
def test_kernels_equal_the_oracle(tokens, gate, scale, state):
    """Output, final state and every gradient equal the oracle's for odd lengths, with each option and without."""
    assert_like_the_oracle(few(tokens, gate=gate, scale=scale, state=state))


@pytest.mark.parametrize(("documents", "gate"), [((0,), True), ((5, 6, 20, 32), True), ((16, 31), False)])
def test_documents_do_not_see_each_other(documents, gate):
    """Packed documents, also of one token and at the edges of chunks, equal the oracle's, state and gradients too."""
    inputs = few(37, gate=gate, scale=gate, state=True)
    assert_like_the_oracle(inputs, documents=documents)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [False, True])
def test_half_precision(dtype, gate):
    """bf16 and fp16 inputs come within their own precision of the oracle on the same inputs, from a float32 state."""
    assert_like_the_oracle(few(35, gate=gate, scale=gate, state=gate), dtype=dtype)


@pytest.mark.parametrize(
    "maps",
    [
        pytest.param(lambda phi: feature_maps.Gaussian(phi.w_HDK), id="gaussian of any length"),
        pytest.param(
            lambda phi: feature_maps.ArcCosine(torch.cat([phi.w_HDK] * 2, 1), unit_norm=True), id="arc_cosine"
        ),
    ],
)
def test_other_random_maps(maps):
    """Features of vectors that are not normalised, and arc-cosine ones, equal the oracle's."""
    assert_like_the_oracle(few(20, gate=True, scale=True, state=True), maps=maps)


@pytest.mark.parametrize("kind", ["elu", "none"])
def test_maps_without_projections(kind):
    """elu + 1 inside the kernels, and positive features given as they are, equal the oracle's."""
    inputs = few(20, gate=True, scale=True, state=False)
    if kind == "none":
        inputs.sequence |= {name: inputs.sequence[name].exp() for name in "qk"}
    assert_like_the_oracle(inputs, maps=lambda phi: feature_maps.EluPlusOne() if kind == "elu" else None)


def test_sizes_of_several_blocks():
    """Head sizes, projections and values of more than one tile, none a multiple of it, equal the oracle's."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1, 2, 19, 21), "k": (1, 2, 19, 21), "v": (1, 2, 19, 18), "log_gate": (1, 2, 19)}
    sequence = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    sequence["log_gate"] = -sequence["log_gate"].abs()
    assert_like_the_oracle(Inputs(sequence, {"w": 0.3 * torch.randn(2, 20, 21, generator=generator)}))


@pytest.mark.parametrize("kind", ["exact", "clamp", "sign_clamp", "abs_clamp", "mass", "one"])
def test_every_denominator_policy(kind):
    """Each policy that is not the default one is the oracle's, with its gradients."""
    inputs = few(18, gate=True, scale=True, state=False)
    positive = {"maps": lambda phi: feature_maps.EluPlusOne()} if kind == "exact" else {}
    assert_like_the_oracle(inputs, denominator=Denominator(kind, 0.3), **positive)


def test_a_closed_gate_leaves_nothing():
    """Log gates of -inf and of -1000 cut off all that is older, without a NaN."""
    inputs = few(20, gate=True, scale=True, state=True)
    inputs.sequence["log_gate"][:, :, 3] = float("-inf")
    inputs.sequence["log_gate"][:, :, 17] = -1000.0
    (q, k, v), kwargs = inputs.arguments()
    want, want_after = linear_attention(q, k, v, **kwargs)
    moved_kwargs = {name: moved(value) for name, value in kwargs.items()}
    got, after = by_kernels(moved(q), moved(k), moved(v), **moved_kwargs)
    assert_close(got.cpu(), want)
    assert_close(after.s_BHMV.cpu(), want_after.s_BHMV, kind="state")


def test_the_size_of_key_scales_cancels():
    """Scales so small that one over their sum is infinite give the outputs of any other scale."""
    (q, k, v), kwargs = few(20, gate=False, scale=True, state=False).arguments()
    scale = kwargs.pop("key_scale_BHS")
    outs = [
        by_kernels(
            moved(q), moved(k), moved(v),
            **{name: moved(value) for name, value in kwargs.items()}, key_scale_BHS=moved(each),
            denominator=Denominator("mass"),
        )[0].cpu()
        for each in (torch.full_like(scale, 1e-39), torch.ones_like(scale))
    ]  # fmt: skip
    assert_close(*outs)


def test_a_long_sequence_goes_by_stretches(monkeypatch):
    """Where states of all chunks would take too much memory, stretches pass the state on; results stay the oracle's."""
    monkeypatch.setattr(kernels, "STATE_BYTES", 1)
    inputs = few(37, gate=True, scale=True, state=True)
    assert_like_the_oracle(inputs, documents=(3, 20))


@pytest.mark.parametrize("programs", [1, 6])
def test_splits_are_walked_from_the_states_between_them(programs, monkeypatch):
    """One walk over all chunks, and splits of several with a shorter last one, leave the oracle's states."""
    monkeypatch.setattr(forward, "SUM_PROGRAMS", programs)
    inputs = few(16 * 4 + 5, gate=True, scale=True, state=True)
    assert_like_the_oracle(inputs, documents=(3, 50))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_undivided_sums_have_gradients_in_half_precision(dtype):
    """A pass by the parts that a rank computes, whose sums are float32, has the gradients of the float64 one."""
    row = linear_case("triton", "parts", "gaussian", dtype, Shape(1, 2, 16, 16, 16), True, (), 40)
    assert row["right"], row


def test_rows_need_not_lie_together():
    """q, k and v may be views with the heads inside a token, as a model makes them."""
    inputs = few(20, gate=False, scale=False, state=False)
    (q, k, v), kwargs = inputs.arguments()
    want, _ = linear_attention(q, k, v, **kwargs)
    across = (moved(t).transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    got, _ = by_kernels(*across, feature_map=moved(kwargs["feature_map"]))
    assert_close(got.cpu(), want)


def test_guarded_denominators_are_counted():
    """A watch hears of as many guarded denominators as from the streaming form."""
    (q, k, v), kwargs = few(20, gate=False, scale=False, state=False).arguments()
    counted = []
    for attention, cast in ((linear_attention, lambda x: x), (by_kernels, moved)):
        watch = Watch()
        with watching(watch):
            attention(
                cast(q), cast(k), cast(v), feature_map=cast(kwargs["feature_map"]), denominator=Denominator(eps=0.9)
            )
        counted.append((watch.denominators, watch.guarded))
    assert counted[0] == counted[1]
    assert sum(counted[0][1][0]) > 0


def test_second_derivatives():
    """A backward pass that is differentiated again gives the streaming form's second derivatives."""
    (q, k, v), kwargs = few(5, gate=False, scale=False, state=False).arguments()
    found = []
    for attention, cast in ((linear_attention, lambda x: x), (by_kernels, moved)):
        leaf = cast(q).clone().requires_grad_()
        out, _ = attention(leaf, cast(k), cast(v), feature_map=cast(kwargs["feature_map"]))
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        found.append(second.cpu())
    assert_close(found[1], found[0], kind="gradient")


def test_sine_and_cosine():
    """The kernels' own sine and cosine are within 2e-7 of the exact ones up to 1,000 turns."""

    @triton.jit
    def both(x_ptr, y_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        sine, cosine = sine_and_cosine(tl.load(x_ptr + at))
        tl.store(y_ptr + at, sine)
        tl.store(y_ptr + SIZE + at, cosine)

    x = torch.linspace(-6000, 6000, 4096, device=DEVICE)
    y = torch.empty(2, 4096, device=DEVICE)
    both[(1,)](x, y, SIZE=4096)
    exact = torch.stack([x.double().sin(), x.double().cos()])
    assert float((y.double() - exact).abs().max()) < 2e-7


@pytest.mark.parametrize("kind", ["gaussian", "arc_cosine", "elu"])
def test_the_step_equals_the_sequence(kind):
    """One kernel per token gives the outputs and states of the streaming form; it leaves the state it was given, but
    where it may write over it.
    """
    (q, k, v), kwargs = few(3, gate=True, scale=True, state=True).arguments()
    w = torch.cat([kwargs["feature_map"].w_HDK] * 6, 1)[:, : 33 if kind == "gaussian" else 12]
    maps = {
        "gaussian": feature_maps.Gaussian(w, unit_norm=True),
        "arc_cosine": feature_maps.ArcCosine(w, unit_norm=True),
        "elu": feature_maps.EluPlusOne(),
    }
    generator = torch.Generator().manual_seed(1)
    features = maps[kind](q).shape[-1]
    s, z = torch.randn(1, 2, features, 4, generator=generator), torch.rand(1, 2, features, generator=generator)
    state = replace(kwargs["state"], s_BHMV=s, z_BHM=z)
    want, after = linear_attention(q, k, v, **{**kwargs, "feature_map": maps[kind], "state": state})
    state = moved(state)
    given = [t.clone() for t in state.tensors()]
    for in_place in (False, True):
        outs, now = [], state
        with torch.no_grad(), steps_in_place() if in_place else nullcontext():
            for t in range(3):
                out, now = linear_attention_step(
                    *(moved(x)[:, :, t] for x in (q, k, v)),
                    now,
                    feature_map=moved(maps[kind]),
                    log_gate_BH=moved(kwargs["log_gate_BHS"])[:, :, t],
                    key_scale_BH=moved(kwargs["key_scale_BHS"])[:, :, t],
                    implementation="triton",
                )
                outs.append(out)
        assert_close(torch.stack(outs, 2).cpu(), want)
        for got_field, want_field in zip(now.tensors(), after.tensors(), strict=True):
            assert_close(got_field.cpu(), want_field, kind="state")
        assert (now.s_BHMV is state.s_BHMV) == in_place
        assert all(torch.equal(a, b) for a, b in zip(given, state.tensors(), strict=True)) != in_place


@pytest.mark.parametrize("kind", ["exact", "clamp", "sign_clamp", "abs_clamp", "mass", "one"])
def test_the_step_has_every_policy(kind):
    """bf16 tokens under each denominator policy come out as from the eager step, and a watch counts the same."""
    (q, k, v), kwargs = few(1, gate=False, scale=False, state=True).arguments()
    found = []
    for implementation, cast in (("streaming", lambda x: x), ("triton", moved)):
        watch = Watch()
        with watching(watch):
            out, _ = linear_attention_step(
                *(cast(x.bfloat16())[:, :, 0] for x in (q, k, v)),
                cast(kwargs["state"]),
                feature_map=cast(kwargs["feature_map"]),
                denominator=Denominator(kind, 0.3),
                implementation=implementation,
            )
        found.append((out.cpu(), watch.guarded))
    assert_close(found[1][0], found[0][0])
    assert found[0][1] == found[1][1]


def test_a_step_with_gradients_is_not_for_the_kernel():
    """The step's kernel has no backward pass: asked for by name where gradients are needed, it is refused."""
    x = torch.zeros(1, 1, 4, device=DEVICE, requires_grad=True)
    state = LinearState.identity(1, 1, 4, 4, device=DEVICE)
    with pytest.raises(ConfigError, match="has none"):
        linear_attention_step(x, x, x, state, implementation="triton")

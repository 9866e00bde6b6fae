"""C kernels of linear attention in tests: whether this machine has them, and results beside those of the oracle."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.ops import FeatureMap, LinearState, linear_attention
from dist_attn.ops.affine import implementation as affine_implementation
from dist_attn.ops.linear_attention import half_products, implementation, linear_attention_naive
from dist_attn.ops.linear_attention.implementation import why_no_library
from dist_attn.ops.linear_attention.native_call import KernelCall
from tests.support.attention import weighted_sum
from tests.support.closeness import Kind, assert_close

__all__ = [
    "HALF_ERROR",
    "Case",
    "assert_like_the_oracle",
    "assert_near_in_halves",
    "computed_by",
    "kernel_calls",
    "map_of",
    "needs_kernels",
]

_why_not = why_no_library()
needs_kernels = pytest.mark.skipif(_why_not is not None, reason=f"needs C kernels: {_why_not}")

# What bfloat16, of 8 bits, may cost where factors are rounded too: the mean square error over what is right, as roots.
# Of single elements nothing can be said, as small sums may be of large terms.
HALF_ERROR: dict[str, float] = {"output": 1e-2, "state": 6e-3, "gradient": 2e-2}

Attend = Callable[..., tuple[torch.Tensor, LinearState]]


@pytest.fixture(params=["native", "streaming"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What "auto" takes for float32 and bfloat16 on a CPU: C kernels, and as on a machine without a compiler.

    Float64 never goes to C kernels, so that a test in float64 alone would run twice with it and say nothing more.
    """
    if request.param == "streaming":
        for one in (implementation, affine_implementation):
            monkeypatch.setattr(one, "why_no_library", lambda: "there is no C compiler, says a test")
    elif _why_not is not None:
        pytest.skip(f"needs C kernels: {_why_not}")
    return str(request.param)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The C functions that were called, in order."""
    names: list[str] = []
    run = KernelCall.run

    def noted(call: KernelCall, name: str, *, backward: bool = False) -> None:
        names.append(f"dist_attn_{name}")
        run(call, name, backward=backward)

    monkeypatch.setattr(KernelCall, "run", noted)
    yield names


class Case:
    """Random inputs of one call by name; `sequence` lie along tokens, `shared` do not."""

    def __init__(
        self,
        queries: int,
        keys: int | None = None,
        *,
        kind: str = "gaussian",
        gate: bool = False,
        scale: bool = False,
        state: bool = False,
        batch: int = 2,
        heads: int = 2,
        sizes: tuple[int, int, int] = (5, 4, 6),
        seed: int = 0,
    ) -> None:
        self.kind = kind
        generator = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=generator)
        keys, (size, values, projections) = queries if keys is None else keys, sizes
        shapes = {"q": (queries, size), "k": (keys, size), "v": (keys, values)}
        self.sequence = {name: normal(batch, heads, *shape) for name, shape in shapes.items()}
        if kind == "none":
            self.sequence |= {name: self.sequence[name].exp() for name in "qk"}
        if gate:
            self.sequence["log_gate"] = -0.3 * normal(batch, heads, keys).abs()
        if scale:
            self.sequence["key_scale"] = normal(batch, heads, keys).sigmoid()
        self.shared: dict[str, torch.Tensor] = {}
        features = {"gaussian": 2 * projections, "arc_cosine": projections}.get(kind.removesuffix("_unit"), size)
        if kind.startswith(("gaussian", "arc_cosine")):
            self.shared["w"] = normal(heads, projections, size) / size**0.5
        if state:
            self.shared["s"] = normal(batch, heads, features, values)
            self.shared["z"], self.shared["mass"] = normal(batch, heads, features).abs(), normal(batch, heads).abs()

    def leaves(self, cast: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> dict[str, torch.Tensor]:
        """Every input, cast, as a leaf that requires gradients."""
        return {name: cast(t).detach().requires_grad_() for name, t in {**self.sequence, **self.shared}.items()}

    def arguments(self, leaves: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, object]]:
        """q, k and v, and the keywords of `linear_attention`."""
        state = None
        if "s" in leaves:
            nothing = torch.zeros_like(leaves["mass"])
            state = LinearState(leaves["s"], leaves["z"], leaves["mass"], nothing.detach(), nothing.bool())
        gates = {"log_gate_BHS": leaves.get("log_gate"), "key_scale_BHS": leaves.get("key_scale")}
        return [leaves[name] for name in "qkv"], {**gates, "state": state, "feature_map": map_of(self.kind, leaves)}


def assert_near_in_halves(got: torch.Tensor, want: torch.Tensor, *, kind: Kind, what: str = "") -> None:
    """Fail unless all elements together are as near as products of bfloat16 leave them, and none is far off."""
    assert got.shape == want.shape
    error, right = (got - want).float(), want.float()
    assert error.norm() <= HALF_ERROR[kind] * right.norm(), f"{what}: {error.norm() / right.norm()}"
    assert not error.numel() or error.abs().max() <= 5 * HALF_ERROR[kind] * right.abs().max(), what


def map_of(kind: str, tensors: dict[str, torch.Tensor]) -> FeatureMap | None:
    """The feature map of that name over the tensor w."""
    unit = kind.endswith("_unit")
    if kind.startswith("gaussian"):
        return feature_maps.Gaussian(tensors["w"], unit_norm=unit)
    if kind.startswith("arc_cosine"):
        return feature_maps.ArcCosine(tensors["w"], unit_norm=unit)
    return feature_maps.EluPlusOne() if kind == "elu" else None


def by_streaming(*args: object, **kwargs: object) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` in the streaming form, which is tested against the oracle itself."""
    return linear_attention(*args, **kwargs, implementation="streaming")  # type: ignore[arg-type]


def by_kernels(*args: object, **kwargs: object) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` by the C kernels, by name."""
    return linear_attention(*args, **kwargs, implementation="native")  # type: ignore[arg-type]


def assert_like_the_oracle(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    cast: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    kernels: Attend = by_kernels,
    oracle: Attend = linear_attention_naive,
    together: bool = False,
    **options: object,
) -> None:
    """Output, state and every gradient of the kernels equal those of the oracle in float64 on the same numbers.

    States of bfloat16 tensors are exact unless instructions of the processor round what they are sums of. With
    `together` all elements of a tensor count together, for sums so large that single ones say nothing.
    """
    for name in "qkv":
        case.sequence[name] = case.sequence[name].to(dtype)
    found = []
    for attend, of in ((oracle, torch.Tensor.double), (kernels, cast)):
        leaves = case.leaves(of)
        args, kwargs = case.arguments(leaves)
        out, after = attend(*args, **kwargs, **options)
        weighted_sum(out, *after.tensors()[:4]).backward()
        found.append((out, after, {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}))
    (want, want_after, want_grads), (got, after, grads) = found
    assert got.dtype == dtype
    close = assert_near_in_halves if together else assert_close
    close_states = assert_near_in_halves if dtype == torch.bfloat16 and half_products() else assert_close
    close(got, want.to(dtype), kind="output")
    assert torch.equal(after.reset_BH, want_after.reset_BH)
    for field, want_field in zip(after.tensors()[:4], want_after.tensors()[:4], strict=True):
        assert field.dtype == torch.float32
        close_states(field, want_field.float(), kind="state")
    for name, gradient in want_grads.items():
        close(grads[name].to(dtype), gradient.to(dtype), kind="gradient", what=name)

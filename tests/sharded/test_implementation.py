"""What computes on each rank, by name: all ranks refuse the same calls in the same words, those without tokens too."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import FeatureMap, LinearState
from dist_attn.ops.linear_attention import Implementation, LinearCall
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.carry_scan import sharded_linear_attention
from tests.support.closeness import assert_close
from tests.support.native import needs_kernels

LAYOUT = SequenceLayout.from_lengths([8, 0])
X = torch.ones(1, 2, 8, 4)

Call = Callable[[Communicator, torch.Tensor], object]


def linear(
    causal: bool = True,
    prefix: int = 0,
    feature_map: FeatureMap | None = None,
    state: LinearState | None = None,
    implementation: Implementation = "triton",
) -> Call:
    """Linear attention by kernels, of queries, keys and values that are the same."""

    def call(comm: Communicator, x: torch.Tensor) -> object:
        ops = ShardedSequenceOps(comm, LAYOUT, implementation=implementation)
        return ops.linear_attention(x, x, x, causal=causal, prefix=prefix, feature_map=feature_map, state=state)

    return call


def two_walks(comm: Communicator, x: torch.Tensor) -> object:
    """Linear attention that walks over its keys twice."""
    return sharded_linear_attention(comm, LinearCall(x, x, x, implementation="triton"), walks="two_walks")


def refusals(call: Call, x: torch.Tensor) -> list[str]:
    """What each rank raised, rank 0 having all the tokens."""

    def body(comm: Communicator) -> str:
        start, stop = LAYOUT.range(comm.rank)
        with pytest.raises(ConfigError) as found:
            call(comm, x[:, :, start:stop])
        return str(found.value)

    return run_simulated(body, 2, timeout_s=10.0)


@pytest.mark.parametrize("call", [linear(), linear(causal=False), linear(prefix=3), two_walks], ids=range(4))
def test_ranks_without_tokens_refuse_kernels_too(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, each rank raises the same error, and none waits in an exchange for the others."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    first, second = refusals(call, X)
    assert "kernels need a GPU" in first
    assert first == second


@pytest.mark.parametrize(
    ("call", "x", "words"),
    [
        (linear(), X.double(), "float64"),
        (linear(feature_map=feature_maps.Positive(torch.zeros(2, 5, 4))), X, "feature map Positive"),
        (linear(state=LinearState.identity(1, 2, 4, 4, dtype=torch.float64)), X, "float64"),
        (linear(causal=False), X[..., :1].expand(1, 2, 8, 300), "take 1 to 256"),
        (linear(), X[:0], "no tokens"),
    ],
    ids=range(5),
)
def test_ranks_refuse_the_same_for_the_same_reason(
    call: Call, x: torch.Tensor, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, types and states that kernels cannot take are refused by ranks with and without tokens alike."""
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    first, second = refusals(call, x)
    assert words in first
    assert first == second


def test_kernels_by_name_are_refused_when_the_operations_are_made() -> None:
    """The error names what stands against them; an implementation that does not exist is refused likewise."""
    layout, packed = SequenceLayout.from_lengths([4]), SequenceLayout.from_lengths([4], documents=(0, 2))
    with pytest.raises(ConfigError, match="'triton' and a layout with packed documents were given"):
        run_simulated(lambda comm: ShardedSequenceOps(comm, packed, layout, implementation="triton"), 1)
    with pytest.raises(ConfigError, match="'triton' and a memory layout with packed documents were given"):
        run_simulated(lambda comm: ShardedSequenceOps(comm, layout, packed, implementation="triton"), 1)
    for name in ("triton", "fla"):
        with pytest.raises(ConfigError, match=f"'{name}' and deterministic=True were given"):
            run_simulated(partial(ShardedSequenceOps, layout=layout, deterministic=True, implementation=name), 1)
    with pytest.raises(ConfigError, match="'cuda' is unknown; use auto, streaming, native, triton"):
        run_simulated(lambda comm: ShardedSequenceOps(comm, layout, implementation="cuda"), 1)  # type: ignore[arg-type]


PACKED = SequenceLayout.from_lengths([100, 0, 60], documents=(0, 30, 130))


def attended(layout: SequenceLayout, implementation: Implementation, deterministic: bool = False) -> torch.Tensor:
    """Causal outputs of all ranks and the gradient of what they attend over, beside each other."""

    def body(comm: Communicator) -> torch.Tensor:
        start, stop = layout.range(comm.rank)
        x = torch.randn(1, 2, 160, 4, generator=torch.Generator().manual_seed(0))[:, :, start:stop].requires_grad_()
        ops = ShardedSequenceOps(comm, layout, deterministic=deterministic, implementation=implementation)
        out, _ = ops.linear_attention(x, x, x, feature_map=feature_maps.EluPlusOne())
        out.square().sum().backward()
        assert x.grad is not None
        return torch.cat([out.detach(), x.grad], dim=3)

    return torch.cat(run_simulated(body, layout.size), dim=2)


@needs_kernels
@pytest.mark.parametrize("deterministic", [False, True])
def test_c_kernels_by_name_over_documents_and_chunks(deterministic: bool, kernel_calls: list[str]) -> None:
    """Ranks take C kernels by name for packed documents and chunk by chunk; by "streaming" they take none."""
    layout = SequenceLayout.from_lengths([64, 0, 96]) if deterministic else PACKED
    want = attended(layout, "streaming", deterministic)
    assert not kernel_calls
    assert_close(attended(layout, "native", deterministic), want, kind="gradient")
    assert kernel_calls


@needs_kernels
def test_c_kernels_have_the_bits_of_one_rank(kernel_calls: list[str]) -> None:
    """deterministic=True keeps its promise where "auto" takes C kernels, and where they are asked for by name."""
    found = [
        attended(layout, implementation, deterministic=True)
        for implementation in ("auto", "native")
        for layout in (SequenceLayout.from_lengths([160]), SequenceLayout.from_lengths([64, 64, 0, 32]))
    ]
    assert kernel_calls
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("implementation", ["native", "auto"])
def test_c_kernels_of_documents_that_see_all_of_themselves(implementation: Implementation) -> None:
    """Not causal, packed documents have no kernels: by name every rank refuses them, those without tokens too."""

    def body(comm: Communicator) -> str:
        start, stop = PACKED.range(comm.rank)
        x = torch.ones(1, 2, stop - start, 4)
        ops = ShardedSequenceOps(comm, PACKED, implementation=implementation)
        try:
            ops.linear_attention(x, x, x, causal=False)
        except ConfigError as error:
            return str(error)
        return ""

    words = run_simulated(body, 3, timeout_s=10.0)
    assert len(set(words)) == 1
    assert ("not causal and there are several documents" in words[0]) == (implementation == "native")


@needs_kernels
@pytest.mark.parametrize(
    ("call", "x", "words"),
    [
        (linear(implementation="native"), X.double(), "float64"),
        (linear(prefix=3, implementation="native"), X.double(), "float64"),
        (linear(causal=False, implementation="native"), X[..., :1].expand(1, 2, 8, 1300), "take 1 to 1024"),
        (linear(implementation="native"), X[:0], "no tokens"),
    ],
    ids=range(4),
)
def test_ranks_refuse_c_kernels_for_the_same_reason(call: Call, x: torch.Tensor, words: str) -> None:
    """What C kernels cannot take is refused in the same words by ranks with tokens and without."""
    first, second = refusals(call, x)
    assert words in first
    assert first == second

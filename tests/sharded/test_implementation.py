"""What computes on each rank, by name: all ranks refuse the same calls in the same words, those without tokens too."""

from collections.abc import Callable

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import FeatureMap, LinearState, RelativeState
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.carry_scan import sharded_linear_attention

LAYOUT = SequenceLayout.from_lengths([8, 0])
X = torch.ones(1, 2, 8, 4)

Call = Callable[[Communicator, torch.Tensor], object]


def linear(
    causal: bool = True, prefix: int = 0, feature_map: FeatureMap | None = None, state: LinearState | None = None
) -> Call:
    """Linear attention by kernels, of queries, keys and values that are the same."""

    def call(comm: Communicator, x: torch.Tensor) -> object:
        ops = ShardedSequenceOps(comm, LAYOUT, implementation="triton")
        return ops.linear_attention(x, x, x, causal=causal, prefix=prefix, feature_map=feature_map, state=state)

    return call


def relative(state: RelativeState | None = None) -> Call:
    """The stream of relative attention by kernels."""

    def call(comm: Communicator, x: torch.Tensor) -> object:
        ops = ShardedSequenceOps(comm, LAYOUT, implementation="triton")
        return ops.relative_attention_streaming(x, x, x, torch.ones(2, 5, 4), state)

    return call


def two_walks(comm: Communicator, x: torch.Tensor) -> object:
    """Linear attention that walks over its keys twice."""
    return sharded_linear_attention(comm, x, x, x, walks="two_walks", implementation="triton")


def refusals(call: Call, x: torch.Tensor) -> list[str]:
    """What each rank raised, rank 0 having all the tokens."""

    def body(comm: Communicator) -> str:
        start, stop = LAYOUT.range(comm.rank)
        with pytest.raises(ConfigError) as found:
            call(comm, x[:, :, start:stop])
        return str(found.value)

    return run_simulated(body, 2, timeout_s=10.0)


@pytest.mark.parametrize(
    "call", [linear(), linear(causal=False), linear(prefix=3), two_walks, relative()], ids=range(5)
)
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
        (relative(), X.double(), "float64"),
        (relative(RelativeState.identity(1, 2, 4, 4, 2, dtype=torch.float64)), X, "float64"),
    ],
    ids=range(7),
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
    with pytest.raises(ConfigError, match="'triton' and deterministic=True were given"):
        run_simulated(lambda comm: ShardedSequenceOps(comm, layout, deterministic=True, implementation="triton"), 1)
    with pytest.raises(ConfigError, match="'cuda' is unknown; use auto, streaming or triton"):
        run_simulated(lambda comm: ShardedSequenceOps(comm, layout, implementation="cuda"), 1)  # type: ignore[arg-type]

"""Relative attention as the built-in operations are tested: derivatives, graphs, ranks that agree, kernels by name."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import MismatchError
from dist_attn.feature_maps import elu_plus_one
from dist_attn.layout import SequenceLayout
from dist_attn.model_config.mixers import kernels
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.linear_attention import Implementation
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.ops.relative_attention import (
    RelativeState,
    numerators,
    relative_attention,
    relative_attention_naive,
    relative_attention_streaming,
)
from tests.models.test_compile import _results
from tests.ops import test_second_derivatives as derivatives
from tests.ops import test_triton_full as triton_full
from tests.sharded import test_implementation as implementation
from tests.sharded.test_call_agreement import LAYOUT as AGREED
from tests.sharded.test_implementation import LAYOUT, Call, X, refusals
from tests.sharded.test_operations import ANY, CUTS
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.native import needs_kernels
from tests.support.sharded_call import check_sharded, random_tensor


def _relative(attention: Callable[..., Tensor], length: int, causal: bool) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, length, 3), (1, 2, length, 3), (1, 2, length, 4), (2, 7, 3)]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    q, k, v, rp = leaves
    return weighted_sum(attention(elu_plus_one(q), elu_plus_one(k), v, elu_plus_one(rp), causal=causal)), leaves


derivatives.FORMS["relative"] = (_relative, relative_attention, relative_attention_naive)


@pytest.mark.parametrize("causal", [True, False])
def test_derivatives(causal: bool) -> None:
    """The gradient of a gradient penalty is the oracle's, and `create_graph` changes no gradient."""
    derivatives.test_a_gradient_penalty_has_the_oracles_gradient("relative", causal)
    derivatives.test_create_graph_changes_no_gradient("relative", causal)


@pytest.mark.parametrize("causal", [True, False])
def test_relative_attention_is_one_graph(causal: bool) -> None:
    """Relative attention compiles with `fullgraph`, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).requires_grad_() for s in (*[(1, 2, 70, 3)] * 3, (2, 7, 3))]

    def attend() -> Tensor:
        q, k, v, rp = inputs
        return relative_attention(elu_plus_one(q), elu_plus_one(k), v, elu_plus_one(rp), causal=causal)

    got = _results(torch.compile(attend, fullgraph=True, backend="eager"), inputs)
    for a, b in zip(got, _results(attend, inputs), strict=True):
        assert_close(a, b, kind="gradient")


@ANY
@given(lengths=CUTS, reach=st.sampled_from([0, 1, 4, 30]), causal=st.booleans())
def test_relative_attention(lengths, reach, causal):
    """Relative attention over ranks equals one rank's, for windows wider than a slice too, with all gradients."""
    total = sum(lengths)
    q, k, rp = (
        random_tensor(2, 3, total, 6, seed=0),
        random_tensor(2, 3, total, 6, seed=1),
        random_tensor(3, 2 * reach + 1, 6, seed=3),
    )
    check_sharded(
        lambda ops, t: (relative_attention(t[0].exp(), t[1].exp(), t[2], t[3].exp(), causal=causal, ops=ops),),
        SequenceLayout.from_lengths(lengths),
        [q, k, random_tensor(2, 3, total, 4, seed=2)],
        whole=[rp],
    )


RP = random_tensor(3, 5, 3, seed=1).exp()


@pytest.mark.parametrize("causal", [True, False])
def test_an_empty_batch(causal: bool) -> None:
    """No sequences in, no outputs out, forward and backward."""
    x = torch.zeros(0, 3, 14, 3, dtype=torch.float64)
    check_sharded(
        lambda ops, t: (relative_attention(t[0], t[0], t[0], RP, causal=causal, ops=ops),),
        SequenceLayout.from_lengths((5, 0, 9)),
        [x],
    )


@pytest.mark.parametrize("causal", [True, False])
def test_relative_attention_keeps_its_precision_under_autocast(causal):
    """Under bf16 autocast, relative attention keeps the bits it has without, on one rank and over several."""
    layout = SequenceLayout.from_lengths([20, 50])
    x, rp = random_tensor(1, 2, 70, 6, seed=0).exp().float(), random_tensor(2, 9, 6, seed=1).exp().float()

    def run(comm: Communicator, enabled: bool) -> list[torch.Tensor]:
        start, stop = layout.range(comm.rank)
        part = x[:, :, start:stop]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            whole = relative_attention(x, x, x, rp, causal=causal, ops=LocalSequenceOps())
            return [
                whole,
                relative_attention(part, part, part, rp, causal=causal, ops=ShardedSequenceOps(comm, layout)),
            ]

    for without, under in zip(*(run_simulated(lambda c, e=e: run(c, e), 2) for e in (False, True)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(without, under, strict=True))


def test_positions_that_differ_between_ranks_are_named() -> None:
    """A reach that one rank has alone is a MismatchError that names both shapes."""

    def fn(comm: Communicator) -> None:
        x = torch.ones(1, 2, AGREED.lengths[comm.rank], 3)
        rp = torch.ones(2, 5 if comm.rank == 2 else 3, 3)
        relative_attention(x, x, x, rp, causal=False, ops=ShardedSequenceOps(comm, AGREED))

    with pytest.raises(MismatchError, match=r"rp is float32\[2x3x3\] on rank 0 and float32\[2x5x3\] on rank 2"):
        run_simulated(fn, 3)


def relative(state: RelativeState | None = None, implementation: Implementation = "triton") -> Call:
    """The stream of relative attention by kernels."""

    def call(comm: Communicator, x: torch.Tensor) -> object:
        ops = ShardedSequenceOps(comm, LAYOUT, implementation=implementation)
        return relative_attention_streaming(x, x, x, torch.ones(2, 5, 4), state, ops=ops)

    return call


def test_ranks_without_tokens_refuse_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, each rank raises the same error, and none waits in an exchange for the others."""
    implementation.test_ranks_without_tokens_refuse_kernels_too(relative(), monkeypatch)


@pytest.mark.parametrize(
    ("call", "x"),
    [(relative(), X.double()), (relative(RelativeState.identity(1, 2, 4, 4, 2, dtype=torch.float64)), X)],
    ids=range(2),
)
def test_ranks_refuse_the_same_for_the_same_reason(call: Call, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types and states that kernels cannot take are refused by ranks with and without tokens alike."""
    implementation.test_ranks_refuse_the_same_for_the_same_reason(call, x, "float64", monkeypatch)


@needs_kernels
def test_ranks_refuse_c_kernels_for_the_same_reason() -> None:
    """There are none of the stream."""
    first, second = refusals(relative(implementation="native"), X)
    assert "no C kernels of this operation" in first
    assert first == second


def test_relative_attention_over_ranks_has_no_c_kernels() -> None:
    """By name they are refused there too."""

    def call(comm: Communicator, x: torch.Tensor) -> object:
        ops = ShardedSequenceOps(comm, LAYOUT, implementation="native")
        return relative_attention(x, x, x, torch.ones(2, 5, 4), causal=True, ops=ops)

    assert len(set(refusals(call, X))) == 1


@pytest.mark.slow
@pytest.mark.skipif(triton_full.DEVICE != "cpu", reason="simulated ranks are of the CPU")
def test_ranks_with_kernels_equal_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks that compute by kernels, one without tokens, give the outputs and gradients of one that does not."""
    rp = torch.rand(2, 7, 5, generator=torch.Generator().manual_seed(2))

    def call(ops, leaves, start, stop):
        return relative_attention_streaming(leaves[0].exp(), leaves[1].exp(), leaves[2], rp, ops=ops)[0]

    triton_full.check_ranks_with_kernels(call, monkeypatch)


def test_the_counted_chunks_are_the_forms() -> None:
    """Chunks by which the formulas count are those by which the operation works."""
    assert kernels.CHUNK_TOKENS == numerators.CHUNK_TOKENS

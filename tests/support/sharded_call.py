"""One call on the whole sequence and on ranks that hold slices of it: outputs and every gradient must be equal."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps, SoftmaxExchange
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.ranks import Kind, run_ranks

__all__ = ["check_sharded", "random_tensor"]

Call = Callable[[SequenceOps, Sequence[Tensor]], tuple[Tensor, ...]]
"""From the inputs to the output, whose tokens lie along dim -2, and what is the same on every rank (a state)."""


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def check_sharded(
    call: Call,
    layout: SequenceLayout,
    cut: Sequence[Tensor],
    *,
    memory_layout: SequenceLayout | None = None,
    memory: Sequence[Tensor] = (),
    whole: Sequence[Tensor] = (),
    kind: Kind = "simulated",
    softmax: SoftmaxExchange = "reshuffle",
) -> None:
    """`cut` and `memory` are sliced by their layouts along dim -2, `whole` are replicated; all get gradients.

    The loss counts what is replicated once, on the last rank, as the whole sequence does.
    """
    memory_layout = layout if memory_layout is None else memory_layout

    def run(ops: SequenceOps, own: tuple[int, int], seen: tuple[int, int], share: float) -> list[list[Tensor]]:
        leaves = [x[..., slice(*own), :].clone().requires_grad_() for x in cut]
        leaves += [x[..., slice(*seen), :].clone().requires_grad_() for x in memory]
        leaves += [x.clone().requires_grad_() for x in whole]
        out, *same = call(ops, leaves)
        weights = random_tensor(*out.shape[:-2], layout.total, out.shape[-1], seed=9)[..., slice(*own), :]
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in same]
        ((out * weights).sum() + share * weighted_sum(*parts)).backward()
        return [
            [out.detach()],
            [t.detach() for t in same],
            [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves],
        ]

    def body(comm: Communicator) -> list[list[Tensor]]:
        ops = ShardedSequenceOps(comm, layout, memory_layout, softmax=softmax)
        last = float(comm.rank == comm.size - 1)
        return run(ops, layout.range(comm.rank), memory_layout.range(comm.rank), last)

    want = run(LocalSequenceOps(), (0, layout.total), (0, memory_layout.total), 1.0)
    ranks = run_ranks(kind, body, layout.size)
    assert_close(torch.cat([r[0][0] for r in ranks], -2), want[0][0])
    for _, same, _ in ranks:
        for got, field in zip(same, want[1], strict=True):
            assert_close(got, field, kind="state")
    sliced = len(cut) + len(memory)
    for index, gradient in enumerate(want[2]):
        parts = [r[2][index] for r in ranks]
        got = torch.cat(parts, -2) if index < sliced else torch.stack(parts).sum(0)
        assert_close(got, gradient, kind="gradient", what=f"gradient {index}")

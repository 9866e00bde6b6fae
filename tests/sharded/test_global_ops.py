"""Sharded = unsharded for the operations with a window or the whole sequence in view: relative, softmax, Fourier."""

from collections.abc import Callable

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.ranks import run_ranks

LENGTHS = [(7,), (5, 9), (13, 0, 4), (1, 6, 0, 17, 3), (0, 11, 2, 2, 1), (70, 130)]
Call = Callable[..., torch.Tensor]


def _random(*shape: int, seed: int, positive: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if positive:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _check(kind: str, lengths: tuple[int, ...], call: Call, cut: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    """`cut` tensors are sliced along the sequence (dim -2), `whole` ones are replicated."""
    layout = SequenceLayout.from_lengths(lengths)

    def run(ops, start: int, stop: int):
        leaves = [x[..., start:stop, :].clone().requires_grad_() for x in cut]
        leaves += [x.clone().requires_grad_() for x in whole]
        out = call(ops, *leaves)
        weights = _random(*out.shape[:-2], layout.total, out.shape[-1], seed=9)
        (out * weights[..., start:stop, :]).sum().backward()
        return out.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    def body(comm: Communicator):
        return run(ShardedSequenceOps(comm, layout), *layout.range(comm.rank))

    want, want_grads = run(LocalSequenceOps(), 0, layout.total)
    ranks = run_ranks(kind, body, len(lengths))
    assert_close(torch.cat([r[0] for r in ranks], -2), want)
    for index, gradient in enumerate(want_grads):
        parts = [r[1][index] for r in ranks]
        got = torch.cat(parts, -2) if index < len(cut) else torch.stack(parts).sum(0)
        assert_close(got, gradient, kind="gradient", what=f"gradient {index}")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [0, 1, 4, 30])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_relative_attention(lengths, reach, causal):
    """Relative attention over ranks equals one rank's, for windows wider than a slice too, with all gradients."""
    total = sum(lengths)
    q, k = (_random(2, 3, total, 6, seed=s, positive=True) for s in (0, 1))
    v, rp = _random(2, 3, total, 4, seed=2), _random(3, 2 * reach + 1, 6, seed=3, positive=True)

    def call(ops, q, k, v, rp):
        return ops.relative_attention(q, k, v, rp, causal=causal)

    _check("simulated", lengths, call, [q, k, v], [rp])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 2), (1, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_softmax_attention(lengths, heads, groups, causal):
    """Exact softmax by head reshuffle equals one rank's, with fewer heads than ranks and grouped key heads."""
    total = sum(lengths)
    q = _random(2, heads, total, 5, seed=0)
    k, v = _random(2, groups, total, 5, seed=1), _random(2, groups, total, 4, seed=2)

    def call(ops, q, k, v):
        return ops.softmax_attention(q, k, v, causal=causal)

    _check("simulated", lengths, call, [q, k, v], [])


@pytest.mark.parametrize("norm", [None, "ortho"])
@pytest.mark.parametrize("size", [1, 2, 5, 6])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_fourier_mix(lengths, size, norm):
    """Fourier mixing over ranks equals one rank's for any length and width, with its gradient."""
    x = _random(2, sum(lengths), size, seed=0)

    def call(ops, x):
        return ops.fourier_mix(x, norm=norm)

    _check("simulated", lengths, call, [x], [])


OPERATIONS: dict[str, Call] = {
    "relative causal": lambda ops, x, rp: ops.relative_attention(x, x, x, rp, causal=True),
    "relative full": lambda ops, x, rp: ops.relative_attention(x, x, x, rp, causal=False),
    "softmax": lambda ops, x, _: ops.softmax_attention(x, x, x, causal=True),
    "fourier": lambda ops, x, _: ops.fourier_mix(x.flatten(0, 1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_empty_batch(name):
    """No sequences in, no outputs out, forward and backward."""
    rp = _random(3, 5, 4, seed=1, positive=True)
    _check("simulated", (5, 0, 9), lambda ops, x: OPERATIONS[name](ops, x, rp), [torch.zeros(0, 3, 14, 4).double()], [])


@pytest.mark.parametrize("causal", [True, False])
def test_relative_attention_keeps_its_precision_under_autocast(causal):
    """Under bf16 autocast, relative attention keeps the bits it has without, on one rank and over several."""
    layout = SequenceLayout.from_lengths([20, 50])
    x, rp = _random(1, 2, 70, 6, seed=0, positive=True).float(), _random(2, 9, 6, seed=1, positive=True).float()

    def run(comm: Communicator, enabled: bool) -> list[torch.Tensor]:
        start, stop = layout.range(comm.rank)
        part = x[:, :, start:stop]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            whole = LocalSequenceOps().relative_attention(x, x, x, rp, causal=causal)
            return [whole, ShardedSequenceOps(comm, layout).relative_attention(part, part, part, rp, causal=causal)]

    for without, under in zip(*(run_simulated(lambda c, e=e: run(c, e), 2) for e in (False, True)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(without, under, strict=True))


@pytest.mark.parametrize("size", [4, 5])
def test_the_half_spectrum_is_all_that_travels(size):
    """Both all-to-alls of Fourier mixing carry 2 L (D // 2 + 1) (P - 1) / P elements per batch element and rank."""
    layout = SequenceLayout.from_lengths([6, 6, 6])
    x = _random(1, 18, size, seed=0)

    def body(comm: Communicator) -> int:
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        ops.fourier_mix(x[:, slice(*layout.range(comm.rank))])
        return comm.traffic.bytes_sent

    assert sum(run_simulated(body, 3)) == 2 * 8 * 2 * 18 * (size // 2 + 1) * 2 // 3

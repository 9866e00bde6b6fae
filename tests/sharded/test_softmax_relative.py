"""Relative positions in exact softmax attention across ranks: one rank's outputs and every gradient, the rows' too."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, MismatchError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import KeyValueCache, LocalSequenceOps, RelativePositions
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.ranks import run_ranks
from tests.support.sharded_call import check_sharded, random_tensor

SIZE, VALUES, REACH = 5, 4, 3


def _inputs(heads: int, groups: int, queries: int, keys: int, *, shared: bool = False, values: bool = True):
    rows = (1 if shared else heads, 2 * REACH + 1)
    cut = [random_tensor(2, heads, queries, SIZE, seed=0)]
    memory = [random_tensor(2, groups, keys, size, seed=size) for size in (SIZE, VALUES)]
    tables = [random_tensor(*rows, SIZE, seed=7)] + ([random_tensor(*rows, VALUES, seed=8)] if values else [])
    return cut, memory, tables


def _call(**options):
    def call(ops, leaves):
        q, k, v, *tables = leaves
        return (ops.softmax_attention(q, k, v, relative=RelativePositions(*tables), **options),)

    return call


@examples(25)
@given(
    softmax=st.sampled_from(["reshuffle", "ring"]),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 2),
    causal=st.booleans(),
    shared=st.booleans(),
    values=st.booleans(),
    mode=st.sampled_from(["whole", "memory", "documents", "prefix"]),
    data=st.data(),
)
def test_any_cut_of_any_heads(softmax, lengths, groups, repeats, causal, shared, values, mode, data):
    """Any heads over any ranks, a memory, documents or a prefix: one rank's output, and gradients that add up to it."""
    total, starts, options = sum(lengths), None, {"causal": causal, "scale": 0.7}
    memory_layout = None
    if mode == "documents":
        starts = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1)))
    if mode == "memory":
        of_memory = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)).filter(sum))
        memory_layout = SequenceLayout.from_lengths(of_memory)
    if mode == "prefix":
        options |= {"causal": True, "prefix": data.draw(st.integers(0, total))}
    layout = SequenceLayout.from_lengths(lengths, starts)
    keys = total if memory_layout is None else memory_layout.total
    cut, memory, tables = _inputs(groups * repeats, groups, total, keys, shared=shared, values=values)

    def call(ops, leaves):
        # The same call for whole sequences, which know of documents by themselves alone.
        local = LocalSequenceOps(starts) if isinstance(ops, LocalSequenceOps) else ops
        return _call(**options)(local, leaves)

    check_sharded(call, layout, cut, memory_layout=memory_layout, memory=memory, whole=tables, softmax=softmax)


@pytest.mark.parametrize("softmax", ["reshuffle", "ring"])
def test_slices_of_more_than_one_tile(softmax):
    """Slices longer than the tiles that are computed at once, two heads for three ranks, one of them empty."""
    layout = SequenceLayout.from_lengths([300, 0, 900])
    cut, memory, tables = _inputs(2, 2, 1200, 1200)
    check_sharded(_call(causal=True), layout, cut, memory=memory, whole=tables, softmax=softmax)
    assert layout.total == 1200


def _output_and_gradient_of_rows(comm: Communicator, softmax: str) -> list[torch.Tensor]:
    layout = SequenceLayout.from_lengths([9, 0, 14])
    (q,), (k, v), tables = _inputs(2, 1, 23, 23)
    rows, part = [x.requires_grad_() for x in tables], slice(*layout.range(comm.rank))
    ops = ShardedSequenceOps(comm, layout, softmax=softmax) if comm.size > 1 else LocalSequenceOps()
    own = (x[:, :, part] if comm.size > 1 else x for x in (q, k, v))
    out = ops.softmax_attention(*own, causal=True, relative=RelativePositions(*rows))
    out.sum().backward()
    return [out.detach(), *(x.grad for x in rows)]


@pytest.mark.parametrize("softmax", ["reshuffle", "ring"])
def test_over_processes(softmax):
    """The same over real processes joined by gloo, one of them with no tokens."""
    (want,) = run_simulated(partial(_output_and_gradient_of_rows, softmax=softmax), 1)
    ranks = run_ranks("gloo", partial(_output_and_gradient_of_rows, softmax=softmax), 3)
    assert_close(torch.cat([rank[0] for rank in ranks], dim=2), want[0])
    for index in (1, 2):
        assert_close(torch.stack([rank[index] for rank in ranks]).sum(0), want[index], kind="gradient")


@pytest.mark.parametrize("cache", ["spread", "whole"])
def test_a_stream_over_ranks_equals_one_call(cache):
    """Blocks over keys that are spread over ranks, or on all of them, give outputs and gradients of one call."""
    cut, memory, tables = _inputs(3, 3, 20, 20)
    blocks = [(0, [3, 4, 0]), (7, [0, 1, 5]), (13, [2, 2, 3])]

    def one(leaves):
        q, k, v, *rows = leaves
        return LocalSequenceOps().softmax_attention(q, k, v, causal=True, relative=RelativePositions(*rows))

    leaves = [x.clone().requires_grad_() for x in (*cut, *memory, *tables)]
    want = one(leaves)
    weights = random_tensor(*want.shape, seed=5)
    (want * weights).sum().backward()

    def body(comm: Communicator):
        own = [x.clone().requires_grad_() for x in (*cut, *memory, *tables)]
        q, k, v, *rows = own
        held, outs, loss = KeyValueCache(k[:, :, :0], v[:, :, :0]), [], 0.0
        for start, lengths in blocks:
            layout = SequenceLayout.from_lengths(lengths)
            ops = ShardedSequenceOps(comm, layout, cache=cache)
            part = slice(*(start + edge for edge in layout.range(comm.rank)))
            out, held = ops.softmax_attention_streaming(
                q[:, :, part], k[:, :, part], v[:, :, part], held, relative=RelativePositions(*rows)
            )
            outs.append(out.detach())
            loss = loss + (out * weights[:, :, part]).sum()
        loss.backward()
        return outs, [x.grad for x in own]

    ranks = run_simulated(body, 3)
    got = torch.cat([rank[0][block] for block in range(3) for rank in ranks], dim=2)
    assert_close(got, want)
    for index, leaf in enumerate(leaves):
        total = torch.stack([rank[1][index] for rank in ranks]).sum(0)
        assert_close(total, leaf.grad, kind="gradient", what=f"gradient {index}")


def test_calls_that_do_not_fit_are_refused_on_every_rank():
    """Rows on one rank alone are a MismatchError; documents with a memory of its own an InputError."""
    layout = SequenceLayout.from_lengths([4, 5])
    (q,), (k, v), tables = _inputs(2, 2, 9, 9)

    def body(comm: Communicator) -> None:
        part = slice(*layout.range(comm.rank))
        relative = RelativePositions(*tables) if comm.rank else None
        ops = ShardedSequenceOps(comm, layout)
        ops.softmax_attention(q[:, :, part], k[:, :, part], v[:, :, part], causal=True, relative=relative)

    with pytest.raises(MismatchError, match=r"options\.relative is none on rank 0"):
        run_simulated(body, 2)

    def packed(comm: Communicator) -> None:
        own = SequenceLayout.from_lengths([4, 5], [0, 2])
        ops = ShardedSequenceOps(comm, own, SequenceLayout.from_lengths([5, 4], [0, 3]))
        a, b = (slice(*x.range(comm.rank)) for x in (own, SequenceLayout.from_lengths([5, 4])))
        ops.softmax_attention(q[:, :, a], k[:, :, b], v[:, :, b], causal=False, relative=RelativePositions(*tables))

    with pytest.raises(InputError, match="memory on its own layout"):
        run_simulated(packed, 2)

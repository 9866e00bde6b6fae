"""Attention over ranks in its other modes: a prefix that sees itself fully, and a memory cut elsewhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState
from tests.support.examples import examples
from tests.support.pairs import each_pair
from tests.support.sharded_call import check_sharded, random_tensor

LENGTHS = [(7,), (5, 9), (13, 0, 4), (0, 11, 2, 2, 1), (70, 130)]


def _check(
    queries: tuple[int, ...], keys: tuple[int, ...], *, causal: bool, gate: bool, state: bool, prefix: int = 0
) -> None:
    """q on one layout; k, v and per key a gate and a scale on the other; a state that is equal on all ranks."""

    def call(ops, t):
        q, k, v, per_key, s, z, mass = t
        before = LinearState(s, z, mass, torch.zeros_like(mass), torch.zeros_like(mass, dtype=torch.bool))
        out, after = ops.linear_attention(
            q.abs() + 0.05,
            k.abs() + 0.05,
            v,
            log_gate_BHS=-per_key[..., 0].abs() if gate else None,
            key_scale_BHS=per_key[..., 1].sigmoid() if gate else None,
            causal=causal,
            state=before if state else None,
            prefix=prefix,
        )
        return out, *after.tensors()[:4]

    total = sum(keys)
    check_sharded(
        call,
        SequenceLayout.from_lengths(queries),
        [random_tensor(2, 2, sum(queries), 5, seed=0)],
        memory_layout=SequenceLayout.from_lengths(keys),
        memory=[random_tensor(2, 2, total, size, seed=size) for size in (5, 3, 2)],
        whole=[random_tensor(2, 2, 5, 3, seed=6), random_tensor(2, 2, 5, seed=7).abs(), random_tensor(2, 2, seed=8)],
    )


@pytest.mark.parametrize(("lengths", "prefix", "gated"), each_pair(LENGTHS, (1, 5, 14, 500), (False, True)))
def test_prefix(lengths, prefix, gated):
    """A prefix that ends inside, at the edge of or behind slices gives one rank's outputs, state and gradients."""
    _check(lengths, lengths, causal=True, gate=gated, state=gated, prefix=prefix)


@examples(25)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), prefix=st.integers(0, 120), gate=st.booleans())
def test_prefix_for_any_cut(lengths, prefix, gate):
    """However a sequence is cut over 1 to 6 ranks, and wherever its prefix ends, nothing changes."""
    _check(tuple(lengths), tuple(lengths), causal=True, gate=gate, state=False, prefix=prefix)


@pytest.mark.parametrize(
    ("cuts", "gated", "causal"),
    each_pair(
        [((4, 5), (13, 1)), ((0, 3, 2), (0, 0, 30)), ((7, 0), (0, 2)), ((1, 2, 3), (0, 0, 0)), ((6,), (9,))],
        (False, True),
        (True, False),
    ),
)
def test_a_memory_of_its_own(cuts, gated, causal):
    """Attention over a memory that is cut elsewhere, also where ranks hold none of it, with all gradients."""
    _check(*cuts, causal=causal, gate=gated, state=gated)


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Queries and keys over the same 1 to 5 ranks, each cut in any way."""
    size = draw(st.integers(1, 5))
    queries, keys = (draw(st.lists(st.integers(0, 30), min_size=size, max_size=size)) for _ in range(2))
    return tuple(queries), tuple(keys)


@examples(25)
@given(cuts=two_cuts(), prefix=st.integers(0, 60), gate=st.booleans())
def test_causal_over_any_two_cuts(cuts, prefix, gate):
    """Query i sees the keys up to i wherever both lie, more or fewer queries than keys, with a prefix or without."""
    _check(*cuts, causal=True, gate=gate, state=True, prefix=prefix)


@pytest.mark.parametrize(
    ("lengths", "prefix", "exchange"), each_pair(LENGTHS[1:4], (1, 5, 14, 500), ("reshuffle", "ring"))
)
def test_softmax_with_a_prefix(lengths, prefix, exchange):
    """Exact attention with a prefix gives one rank's outputs and gradients by moving heads and by a ring."""
    total, heads = sum(lengths), (4, 2, 2)
    check_sharded(
        lambda ops, t: (ops.softmax_attention(*t, causal=True, prefix=prefix),),
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, h, total, 3, seed=s) for s, h in enumerate(heads)],
        softmax=exchange,
    )

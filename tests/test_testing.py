"""The kit for context parallelism: our own operations pass, and each planted bug of the field is named."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.comm.differentiable import all_gather
from dist_attn.layout import SequenceLayout
from dist_attn.ops import AffineState, LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.testing import Forward, Subject, check_context_parallel, context_parallel_faults
from tests.support.ranks import run_ranks

HEADS, SIZE, TAPS = 2, 4, 4
WIDTH = HEADS * SIZE
Outputs = tuple[Tensor, Tensor | None]


def layer(ops: SequenceOps, x_BLD: Tensor, state: Tensor | None, parameters: Sequence[Tensor]) -> Outputs:
    """A short convolution, and a gated delta rule behind it; the state holds the recurrence's and the tail."""
    taps_KD, w_DX = parameters
    batch, tail, before = len(x_BLD), None, None
    if state is not None:
        tail_BX, sums_BX = state.split([(TAPS - 1) * WIDTH, HEADS * SIZE * SIZE], dim=1)
        tail = tail_BX.view(batch, TAPS - 1, WIDTH)
        before = AffineState.from_sums(sums_BX.view(batch, HEADS, SIZE, SIZE))
    x_BLD, tail_BKD = ops.convolve_streaming(x_BLD, taps_KD, tail)
    q, k, v = (t.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for t in (x_BLD @ w_DX).chunk(3, dim=2))
    decay, beta = -F.softplus(v.mean(-1, keepdim=True)), q.mean(-1).sigmoid()
    out, after = ops.gated_delta_rule(
        F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta_BHL=beta, log_decay_BHLK=decay, state=before
    )
    return out.transpose(1, 2).flatten(2), torch.cat([tail_BKD.flatten(1), after.s_BHKV.flatten(1)], dim=1)


def sound(
    comm: Communicator, layout: SequenceLayout, x: Tensor, state: Tensor | None, parameters: Sequence[Tensor]
) -> Outputs:
    """The layer over ranks as it should be."""
    return layer(ShardedSequenceOps(comm, layout), x, state, parameters)


def subject(forward: Forward) -> Subject:
    """What is checked, with inputs that matter."""
    torch.manual_seed(0)
    shapes = (1, 61, WIDTH), (TAPS, WIDTH), (WIDTH, 3 * WIDTH), (1, (TAPS - 1) * WIDTH + HEADS * SIZE * SIZE)
    x_BLD, taps_KD, w_DX, state_BX = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return Subject(forward, x_BLD, (taps_KD, 0.5 * w_DX), state_BX)


def leaking(comm, layout, x, state, parameters):
    """Documents are not told to anybody."""
    return sound(comm, replace(layout, documents=None), x, state, parameters)


def divided(comm, layout, x, state, parameters):
    """Where documents start is divided by the number of ranks, and on one rank is right."""
    starts = layout.documents and tuple(sorted({start // comm.size for start in layout.documents}))
    return sound(comm, replace(layout, documents=starts), x, state, parameters)


def without_state(comm, layout, x, state, parameters):
    """Over ranks the state before is left out."""
    return sound(comm, layout, x, state if comm.size == 1 else None, parameters)


def without_halo(comm, layout, x, state, parameters):
    """Each rank convolves its own tokens alone; the recurrence is right."""
    ops = ShardedSequenceOps(comm, layout)
    if comm.size == 1 or layout.documents:
        return layer(ops, x, state, parameters)
    local = LocalSequenceOps()

    class Mixed:
        convolve_streaming = staticmethod(local.convolve_streaming)
        gated_delta_rule = staticmethod(ops.gated_delta_rule)

    return layer(Mixed(), x, state, parameters)


def even_alone(comm, layout, x, state, parameters):
    """The first tokens of each slice are thought to stand where an even cut would put them: rows are rolled."""
    out, after = sound(comm, layout, x, state, parameters)
    even = SequenceLayout.even(layout.total, layout.size)
    return out.roll(layout.cuts[comm.rank] - even.cuts[comm.rank], dims=1), after


def refusing(comm, layout, x, state, parameters):
    """Slices that are not equal are refused."""
    if len(set(layout.lengths)) > 1:
        raise AssertionError("slices differ")
    return leaking(comm, layout, x, state, parameters)


def empty_left_out(comm, layout, x, state, parameters):
    """A rank without tokens does not join the exchanges."""
    if comm.size > 1 and not x.shape[1]:
        return x.new_zeros(1, 0, WIDTH) + 0 * parameters[1].sum(), None
    return sound(comm, layout, x, state, parameters)


def detached(comm, layout, x, state, parameters):
    """The state before has no gradient over ranks."""
    before = state if state is None or comm.size == 1 else state.detach() + 0 * state
    return sound(comm, layout, x, before, parameters)


def turned(comm, layout, x, state, parameters):
    """Outputs come back in the order from the last rank to the first."""
    out, after = sound(comm, layout, x, state, parameters)
    longest, other = max(layout.lengths), comm.size - 1 - comm.rank
    of_ranks_RBLD = all_gather(comm, F.pad(out, (0, 0, 0, longest - out.shape[1])))
    return of_ranks_RBLD[other][:, : layout.lengths[other]], after


def own_state(comm, layout, x, state, parameters):
    """The state after is right on the last rank alone."""
    out, after = sound(comm, layout, x, state, parameters)
    return out, after if comm.rank == comm.size - 1 or layout.documents else after * 0.5


BUGS: dict[Callable[..., Outputs], set[str]] = {
    leaking: {"leak", "documents"},
    divided: {"leak", "documents"},
    without_state: {"state"},
    without_halo: {"cut", "halo"},
    even_alone: {"cut", "empty"},
    refusing: {"error"},
    empty_left_out: {"hang"},
    turned: {"order", "documents"},
    detached: {"gradient"},
    own_state: {"state"},
}


def test_our_own_layer_has_no_fault() -> None:
    """A convolution and a delta rule over ranks are those of one rank in every case."""
    check_context_parallel(subject(sound))


@pytest.mark.slow
def test_ranks_that_are_processes() -> None:
    """Whoever exchanges over torch.distributed by itself is checked on processes."""
    check_context_parallel(replace(subject(sound), run=partial(run_ranks, "gloo")))


def test_equal_slices_alone() -> None:
    """Whoever takes no others is still asked about documents."""
    assert set(context_parallel_faults(replace(subject(refusing), uneven=False))) == {"leak", "documents"}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_named(bug: Forward) -> None:
    """Each bug of the field is found and called by its name."""
    found = context_parallel_faults(subject(bug))
    assert set(found) >= BUGS[bug], found


def test_a_bug_fails_the_test_that_calls_the_kit() -> None:
    """What is found is raised, by its name."""
    with pytest.raises(AssertionError, match="leak"):
        check_context_parallel(subject(leaking))

"""The carry scan where ranks and types differ: precision, autocast, and which inputs require gradients."""

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState, linear_attention
from dist_attn.sharded import ShardedSequenceOps
from tests.support.attention import Inputs
from tests.support.closeness import assert_close

LAYOUT = SequenceLayout.from_lengths([30, 0, 70])


def _sharded(q, k, v, **kwargs) -> tuple[torch.Tensor, list[LinearState]]:
    def body(comm: Communicator) -> tuple[torch.Tensor, LinearState]:
        start, stop = LAYOUT.range(comm.rank)
        parts = (t[:, :, start:stop] for t in (q, k, v))
        return ShardedSequenceOps(comm, LAYOUT).linear_attention(*parts, **kwargs)

    ranks = run_simulated(body, LAYOUT.size)
    return torch.cat([out for out, _ in ranks], 2), [state for _, state in ranks]


@pytest.mark.parametrize("queries", [torch.float32, torch.float64])
@pytest.mark.parametrize("state", [torch.float32, torch.float64])
def test_the_precision_is_that_of_one_rank(queries, state):
    """Mixed precisions give outputs and states of the types, and to the digits, that one rank alone gives."""
    (q, k, v), kwargs = Inputs.random(100, 100, gate=False, scale=False, state=True, dtype=torch.float32).arguments()
    kwargs["state"] = kwargs["state"].to(state)
    want, want_state = linear_attention(q.to(queries), k, v, **kwargs)
    out, states = _sharded(q.to(queries), k, v, **kwargs)
    assert_close(out, want)
    for after in states:
        assert_close(after.s_BHMV, want_state.s_BHMV, kind="state")


def test_an_empty_batch_over_ranks():
    """No sequences give no outputs over ranks too."""
    x = torch.zeros(0, 2, 100, 4)
    out, states = _sharded(x, x, x)
    assert out.shape == (0, 2, 100, 4)
    assert all(after.s_BHMV.shape == (0, 2, 4, 4) for after in states)


@pytest.mark.parametrize("wanted", [("q",), ("v",), ("log_gate",), ("w",), ("s",), ("q", "mass")])
def test_gradients_of_some_inputs_only(wanted):
    """Where only some inputs require gradients, all ranks exchange the same backward and each gradient is right."""
    inputs = Inputs.random(100, 100, gate=True, scale=True, state=True)

    def gradients(comm: Communicator | None) -> list[torch.Tensor]:
        start, stop = (0, LAYOUT.total) if comm is None else LAYOUT.range(comm.rank)
        leaves = inputs.leaves(start, stop)
        named = leaves.sequence | leaves.replicated
        for name, leaf in named.items():
            leaf.requires_grad_(name in wanted)
        (q, k, v), kwargs = leaves.arguments()
        if comm is None:
            out, _ = linear_attention(q, k, v, **kwargs)
        else:
            out, _ = ShardedSequenceOps(comm, LAYOUT).linear_attention(q, k, v, **kwargs)
        out.square().sum().backward()
        return [named[name].grad for name in wanted]

    want = gradients(None)
    ranks = run_simulated(gradients, LAYOUT.size)
    for at, name in enumerate(wanted):
        parts = [torch.zeros_like(want[at]) if r[at] is None else r[at] for r in ranks]
        got = torch.cat(parts, 2) if name in inputs.sequence else torch.stack(parts).sum(0)
        assert_close(got, want[at], kind="gradient", what=name)

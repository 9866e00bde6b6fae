"""The carry scan: local work between launch and wait, however it is cut; precision; gradients of some inputs."""

from functools import partial

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState, linear_attention
from dist_attn.ops.linear_attention import LinearCall
from dist_attn.sharded import ScanExchange, ShardedSequenceOps, carry_scan, sharded_linear_attention
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close

LAYOUT = SequenceLayout.from_lengths([30, 0, 70])


def _sharded(q, k, v, **kwargs) -> tuple[torch.Tensor, list[LinearState]]:
    def body(comm: Communicator) -> tuple[torch.Tensor, LinearState]:
        start, stop = LAYOUT.range(comm.rank)
        parts = (t[:, :, start:stop] for t in (q, k, v))
        return ShardedSequenceOps(comm, LAYOUT).linear_attention(*parts, **kwargs)

    ranks = run_simulated(body, LAYOUT.size)
    return torch.cat([out for out, _ in ranks], 2), [state for _, state in ranks]


@pytest.mark.usefixtures("computed_by")
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


@pytest.mark.usefixtures("computed_by")
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


WALKS = ["one_walk", "two_walks"]


def _attend_by(
    comm: Communicator, inputs: Inputs, layout: SequenceLayout, walks: str, exchange: ScanExchange
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    leaves = inputs.leaves(*layout.range(comm.rank))
    qkv, kwargs = leaves.arguments()
    out, after = sharded_linear_attention(comm, LinearCall(*qkv, **kwargs), walks=walks, exchange=exchange)
    share = 1.0 if comm.rank == 0 else 0.0
    (out.square().sum() + share * weighted_sum(*after.tensors()[:4])).backward()
    return out.detach(), [t.detach() for t in after.tensors()[:4]], leaves.gradients()


@pytest.mark.parametrize("walks", [*WALKS, None])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    ("lengths", "dtype", "computed_by"),
    [
        ((200, 0, 131, 64), torch.float64, "streaming"),  # float64 never goes to C kernels
        ((1, 330), torch.float64, "streaming"),
        ((200, 0, 131, 64), torch.float32, "native"),
        ((1, 330), torch.float32, "streaming"),
    ],
    indirect=["computed_by"],
)
@pytest.mark.parametrize("overlap", [0, 100])
@pytest.mark.usefixtures("computed_by")
def test_both_ways_to_cut_the_local_work(monkeypatch, overlap, dtype, lengths, gate, walks):
    """One walk and two give one rank's outputs, states and gradients, with tokens within and beyond the overlap."""
    # With gates nothing is left of a state after about 110 tokens.
    monkeypatch.setattr(carry_scan, "OVERLAP_TOKENS", {"cpu": overlap})
    layout = SequenceLayout.from_lengths(lengths)
    inputs = Inputs.random(layout.total, layout.total, gate=gate, scale=gate, state=True, dtype=dtype)
    whole = SequenceLayout.from_lengths([layout.total])
    want = run_simulated(partial(_attend_by, inputs=inputs, layout=whole, walks=walks, exchange=ScanExchange()), 1)[0]
    ranks = run_simulated(
        partial(_attend_by, inputs=inputs, layout=layout, walks=walks, exchange=ScanExchange()), layout.size
    )
    assert_close(torch.cat([out for out, _, _ in ranks], 2), want[0])
    for _, after, _ in ranks:
        for got, field in zip(after, want[1], strict=True):
            assert_close(got, field, kind="state")
    for name, gradient in want[2].items():
        parts = [grads[name] for _, _, grads in ranks]
        got = torch.cat(parts, 2) if name in inputs.sequence else torch.stack(parts).sum(0)
        assert_close(got, gradient, kind="gradient", what=name)


@pytest.mark.parametrize("walks", WALKS)
@pytest.mark.parametrize("algorithm", ["gather", "log_step", "pipelined_ring"])
@pytest.mark.parametrize("lengths", [(250, 0, 131), (3, 5, 2)])
def test_states_travel_while_a_rank_works(monkeypatch, lengths, algorithm, walks):
    """On every rank the exchange is launched before and waited for after the local pass, forward and backward."""
    monkeypatch.setattr(carry_scan, "OVERLAP_TOKENS", {"cpu": 100})
    layout = SequenceLayout.from_lengths(lengths)
    inputs = Inputs.random(layout.total, layout.total, gate=True, scale=False, state=False)

    def body(comm: Communicator) -> list[str]:
        _attend_by(comm, inputs, layout, walks, ScanExchange(algorithm))
        return comm.traffic.order()

    for order in run_simulated(body, layout.size):
        first_forward = order.index("carry with gradient launch")
        local = order.index("local pass mark")
        assert first_forward == 0
        assert local == 1
        assert order[2] == "carry with gradient wait"
        backward = order[order.index("local pass backward mark") - 1 :][:3]
        assert backward == ["carry backward launch", "local pass backward mark", "carry backward wait"]
        assert order[-1] == "carry backward wait"


def test_queries_and_keys_that_differ_in_number_are_refused():
    """A causal rank with more queries than keys is told so, before anything is exchanged."""

    def body(comm: Communicator) -> None:
        x = torch.zeros(1, 1, 4, 2)
        sharded_linear_attention(comm, LinearCall(x, x[:, :, :2], x[:, :, :2]))

    with pytest.raises(ShapeError, match="as many queries as keys"):
        run_simulated(body, 2)

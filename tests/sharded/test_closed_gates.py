"""Gates that are 0 (log gate -inf) or so small that their exp is: what came before is gone, and nothing else."""

import math

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import linear_attention
from dist_attn.ops.linear_attention import linear_attention_naive
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close

# float64 never goes to C kernels.
PRECISIONS = [(torch.float64, "streaming"), (torch.float32, "streaming"), (torch.float32, "native")]

LAYOUT = SequenceLayout.from_lengths([70, 0, 9, 51])
CLOSED_AT = [0, 3, 4, 63, 64, 69, 70, 75, 129]


def inputs(dtype: torch.dtype, closed: float) -> list[torch.Tensor]:
    """Queries, keys, values and log gates of which some are `closed`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 2, LAYOUT.total, size, generator=generator, dtype=dtype) + 0.1 for size in (4, 4, 3))
    log_gate = -torch.rand(1, 2, LAYOUT.total, generator=generator, dtype=dtype)
    log_gate[:, :, CLOSED_AT] = closed
    return [q, k, v, log_gate]


def outputs_and_gradients(attend, tensors, **settings):
    """What `attend` gives for leaves of these values, and the gradients of the sum of squares."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, state = attend(*leaves[:3], log_gate_BHS=leaves[3], **settings)
    (out.square().sum() + state.s_BHMV.square().sum()).backward()
    return [out, state.s_BHMV, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("closed", [-math.inf, -1e30, -1000.0])
@pytest.mark.parametrize(("dtype", "computed_by"), PRECISIONS, indirect=["computed_by"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": False}, {"documents": (0, 66)}, {"documents": (2, 66), "causal": False}],
    ids=["causal", "full", "documents", "full documents"],
)
@pytest.mark.usefixtures("computed_by")
def test_closed_gates_on_one_rank(dtype: torch.dtype, closed: float, settings) -> None:
    """Outputs, state and every gradient with closed gates are those of the recurrence, without a NaN."""
    tensors = inputs(dtype, closed)
    got = outputs_and_gradients(linear_attention, tensors, **settings)
    want = outputs_and_gradients(linear_attention_naive, tensors, **settings)
    for name, one, other in zip(("out", "state", "q", "k", "v", "gate"), got, want, strict=True):
        assert_close(one, other, kind="output" if name in ("out", "state") else "gradient", what=name)


@pytest.mark.parametrize("exchange", ["gather", "exscan", "log_step", "two_level", "pipelined_ring", "serial_ring"])
def test_closed_gates_over_ranks(exchange: str) -> None:
    """The same over ranks, whichever way the carries go, with a closed gate on each side of a cut."""
    tensors = inputs(torch.float64, -math.inf)

    def body(comm: Communicator):
        own = slice(*LAYOUT.range(comm.rank))
        leaves = [x[:, :, own].clone().requires_grad_() for x in tensors]
        ops = ShardedSequenceOps(comm, LAYOUT, exchange=exchange)
        out, state = ops.linear_attention(*leaves[:3], log_gate_BHS=leaves[3])
        (out.square().sum() + state.s_BHMV.square().sum() / comm.size).backward()
        return [out, *(leaf.grad for leaf in leaves)]

    parts = run_simulated(body, LAYOUT.size)
    want = outputs_and_gradients(linear_attention_naive, tensors)
    for name, other, *shares in zip(("out", "q", "k", "v", "gate"), [want[0], *want[2:]], *parts, strict=True):
        assert_close(torch.cat(shares, dim=2), other, kind="output" if name == "out" else "gradient", what=name)

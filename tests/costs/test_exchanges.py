"""The formulas of exchanges against what communicators count."""

import pytest
import torch

from dist_attn import costs
from dist_attn.comm import Communicator, base, run_simulated
from dist_attn.costs import exchanges

SIZES = [1, 2, 3, 5]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("elements", [0, 1, 1000, 16_385])
def test_bytes_of_every_collective(ranks: int, elements: int) -> None:
    """Every collective sends exactly the bytes of its formula, from every rank, small and large."""
    whole = elements * 4
    send = [(3 * rank) % 4 for rank in range(ranks)]

    def measure(comm: Communicator) -> dict[str, int]:
        x = torch.zeros(elements)
        calls = {
            "all_gather": lambda: comm.all_gather(x),
            "all_reduce": lambda: comm.all_reduce_sum(x),
            "reduce_scatter": lambda: comm.reduce_scatter_sum(torch.zeros(ranks, elements)),
            "broadcast": lambda: comm.broadcast(x, 0),
            "all_to_all": lambda: comm.all_to_all(torch.zeros(sum(send), 2), send, [send[comm.rank]] * ranks),
        }
        sent = {}
        for name, call in calls.items():
            comm.traffic.clear()
            call()
            sent[name] = comm.traffic.bytes_sent
        return sent

    for rank, sent in enumerate(run_simulated(measure, ranks)):
        assert sent == {
            "all_gather": costs.all_gather_bytes(whole, ranks),
            "all_reduce": costs.all_reduce_bytes(elements, 4, ranks),
            "reduce_scatter": (ranks - 1) * whole,
            "broadcast": (ranks - 1) * whole if rank == 0 else 0,
            "all_to_all": (sum(send) - send[rank]) * 8,
        }


def test_the_all_reduce_changes_over_where_the_communicator_does() -> None:
    """The size from which an all-reduce takes two steps is the communicator's."""
    assert exchanges.ONE_STEP_BYTES == base.ONE_STEP_BYTES


def test_time_of_an_all_gather() -> None:
    """An all-gather takes one latency and one message per other rank, and nothing alone."""
    link = costs.Link(latency_s=1e-3, bytes_per_s=1e6)
    assert costs.all_gather_seconds(2000, 4, link) == pytest.approx(3 * (1e-3 + 2e-3))
    assert costs.all_gather_seconds(2000, 1, link) == 0

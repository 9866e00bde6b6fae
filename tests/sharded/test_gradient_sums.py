"""Sums of gradients over ranks."""

import torch
from torch import nn

from dist_attn.comm import Communicator, run_simulated
from dist_attn.sharded.gradients import drop_missing, sum_gradients


def test_types_that_alternate_are_summed_together() -> None:
    """Float32 beside bfloat16, as states beside weights: one exchange for each type, and one for which gradients are
    there; what one rank lacks is the others' sum, and what all lack stays missing.
    """

    def on_rank(comm: Communicator) -> tuple[list[torch.Tensor | None], list[str]]:
        types = [torch.float32, torch.bfloat16] * 3
        parameters = [nn.Parameter(torch.zeros(4, dtype=t, device="cpu")) for t in types]
        for place, parameter in enumerate(parameters[:5]):
            if place or comm.rank:
                parameter.grad = torch.full_like(parameter, place + comm.rank)
        drop_missing(parameters, sum_gradients(comm, parameters).tolist())
        labels = [event.label for event in comm.traffic.events if event.name == "all_reduce_sum"]
        return [parameter.grad for parameter in parameters], labels

    for found, labels in run_simulated(on_rank, 2):
        assert labels == ["which gradients", "gradients", "gradients"]
        assert found[5] is None
        for place, gradient in enumerate(found[:5]):
            assert gradient is not None and gradient.tolist() == [2.0 * place + 1] * 4

"""Whether a model gives the same loss and the same gradients over ranks as on one."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from dist_attn.comm import Communicator, run_simulated
from tests.support.closeness import assert_close

__all__ = ["assert_ranks_change_nothing", "randomised"]

Module = TypeVar("Module", bound=nn.Module)


def randomised(model: Module, *, seed: int = 0) -> Module:
    """The model in float64, with every parameter random and large enough to matter."""
    generator = torch.Generator().manual_seed(seed)  # not the global one: simulated ranks are threads
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def assert_ranks_change_nothing(
    make: Callable[[], nn.Module], share: Callable[[nn.Module, Communicator | None], Tensor], size: int
) -> None:
    """Losses and gradients of all parameters, summed over ranks, are those of one process.

    `share(model, comm)` is this rank's share of the loss; without a communicator it is the whole loss.
    """

    def run(comm: Communicator | None) -> tuple[Tensor, dict[str, Tensor]]:
        model = make()
        loss = share(model, comm)
        loss.backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        return loss.detach(), gradients

    want_loss, want = run(None)
    ranks = run_simulated(run, size)
    assert_close(torch.stack([loss for loss, _ in ranks]).sum(), want_loss, what="loss")
    without = [name for name, gradient in want.items() if not bool(gradient.any())]
    assert not without, f"parameters without a gradient are not tested: {without}"
    for name, gradient in want.items():
        assert_close(torch.stack([own[name] for _, own in ranks]).sum(0), gradient, kind="gradient", what=name)

"""What an exchange brought is freed with the graph it was part of."""

import gc
import weakref

import torch

from dist_attn.comm import Communicator, differentiable, run_simulated


def test_a_launched_exchange_frees_what_it_brought() -> None:
    """After the backward pass nothing holds the result of a launched exchange any more."""

    def fn(comm: Communicator) -> bool:
        brought = differentiable.all_gather_start(comm, torch.ones(3, requires_grad=True)).wait()
        held = weakref.ref(brought.grad_fn)
        brought.sum().backward()
        del brought
        gc.collect()
        return held() is None

    assert run_simulated(fn, 2) == [True, True]

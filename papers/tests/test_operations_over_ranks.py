"""The papers' operations over ranks: gradients are derivatives, and processes have the bits of simulated ranks."""

import pytest
import torch
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from papers.tests.support.operation_cases import CASES, RELATIVE_CASES
from tests.sharded import test_over_processes as processes
from tests.sharded.test_gradients import CUTS, _global
from tests.support.closeness import assert_close
from tests.support.ranks import run_ranks

RELATIVE = ("relative", "relative, full")
RUNS = [
    *(processes._Run(name) for name in CASES),
    *(processes._Run(name, documents=(2, 4)) for name in ("fourier", *RELATIVE)),
    *(processes._Run(name, memory=processes.MEMORY_LENGTHS) for name in RELATIVE),
]
processes.CASES.update(CASES)


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_derivatives(name: str, lengths: tuple[int, ...]) -> None:
    """Moving any input on any rank moves all ranks' outputs as the gradients say, with empty and uneven slices."""
    whole, inputs = _global(CASES[name], lengths)
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVE_CASES)
def test_second_derivatives(name: str) -> None:
    """Gradients with `create_graph` are themselves differentiable, across ranks, in every input and state."""
    whole, inputs = _global(RELATIVE_CASES[name], (2, 0, 3))
    assert torch.autograd.gradgradcheck(whole, inputs, fast_mode=True)


def everything(comm: Communicator) -> list[list[Tensor]]:
    """All runs on one group, so that processes are started once."""
    return [processes._results(comm, run) for run in RUNS]


def test_every_operation_and_mode() -> None:
    """Outputs, states and gradients of each operation are, between processes, those of simulated ranks."""
    for simulated, own in zip(run_simulated(everything, 3), run_ranks("gloo", everything, 3), strict=True):
        for run, want, got in zip(RUNS, simulated, own, strict=True):
            for index, (one, other) in enumerate(zip(want, got, strict=True)):
                assert_close(other, one, kind="exact", what=f"{run} {index}")

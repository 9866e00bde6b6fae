"""Training over real processes: wrappers that average gradients, and meshes of rows and slices."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dist_attn import context_parallel
from dist_attn.comm import Communicator
from tests.adapters.test_context_parallel import Gradients, assert_same, gradients, ids, made
from tests.support.ranks import run_processes

pytestmark = pytest.mark.slow
KINDS = ("qwen3_next", "mamba2")


def alone(kind: str, rows: int = 1) -> tuple[float, Gradients]:
    """The mean loss of the rows, each by itself, and its gradients."""
    model = made(kind)
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss for row in ids(rows)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), gradients(model)


def run(fn: Any, size: int) -> list[Any]:
    """What each process returned; what one raised is raised."""
    outcomes = run_processes(fn, size, timeout_s=120.0)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def in_parallel(comm: Communicator, kind: str) -> tuple[float, Gradients]:
    """A step through DistributedDataParallel over the same two ranks that share the sequence."""
    model = made(kind)
    parallel = context_parallel(model, dist.group.WORLD, reduction="mean")
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    loss = wrapped(**parallel.shard({"input_ids": ids(), "labels": ids()})).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("kind", KINDS)
def test_distributed_data_parallel(kind: str) -> None:
    """Where a wrapper averages gradients over the ranks, every rank has those of one process."""
    for got in run(partial(in_parallel, kind=kind), 2):
        assert_same(got, alone(kind))


def on_a_mesh(comm: Communicator, kind: str) -> tuple[float, Gradients]:
    """A step of FSDP2 over 2 x 2 ranks: rows over the first dimension, slices of each over the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "slices"))
    model = made(kind)
    parallel = context_parallel(model, mesh["slices"], reduction="mean")
    layers = [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "Mamba2Block"))]
    assert layers
    for module in (*layers, model):
        fully_shard(module, mesh=mesh["rows", "slices"]._flatten())
    row = ids(2)[mesh["rows"].get_local_rank()][None]
    loss = model(**parallel.shard({"input_ids": row, "labels": row}, lengths=(45, 16))).loss
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or isinstance(parameter.grad, DTensor)
        found[name] = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.full_tensor()
    losses = [torch.zeros(()) for _ in range(4)]
    dist.all_gather(losses, loss.detach())
    return torch.stack(losses).mean().item(), found


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_sharded_over_a_mesh(kind: str) -> None:
    """FSDP2 over rows and slices gives the loss and gradients of one process on all rows."""
    for got in run(partial(on_a_mesh, kind=kind), 4):
        assert_same(got, alone(kind, rows=2))


def summed(comm: Communicator, kind: str) -> tuple[float, Gradients]:
    """A step without a wrapper."""
    model = made(kind)
    parallel = context_parallel(model, dist.group.WORLD)
    loss = model(**parallel.shard({"input_ids": ids(), "labels": ids()}, lengths=(61, 0))).loss
    loss.backward()
    parallel.sum_gradients()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_summed(kind: str) -> None:
    """`sum_gradients` gives every rank the gradients of one process, also where one rank did not use a parameter."""
    for got in run(partial(summed, kind=kind), 2):
        assert_same(got, alone(kind))

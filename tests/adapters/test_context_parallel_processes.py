"""Training over real processes: wrappers that average gradients, and meshes of rows and slices."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
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
SHORT: dict[str, dict[str, Any]] = {  # to compile in seconds
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2},
    "mamba2": {"num_hidden_layers": 1},
}
LAYERS = ("DecoderLayer", "Mamba2Block")


def alone(kind: str, rows: int = 1, **options: Any) -> tuple[float, Gradients]:
    """The mean loss of the rows, each by itself, and its gradients."""
    model = made(kind, **options)
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
    layers = [m for m in model.modules() if type(m).__name__.endswith(LAYERS)]
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


def compiled(comm: Communicator, kind: str, way: str) -> tuple[float, Gradients]:
    """A second step of a model that torch.compile has taken, as layers or whole, perhaps with layers computed again."""
    model = made(kind, **SHORT[kind])
    called, parallel = model, context_parallel(model, dist.group.WORLD)
    if way == "layers":
        for layer in (m for m in model.modules() if type(m).__name__.endswith(LAYERS)):
            layer.compile(backend="aot_eager")
    else:
        called = torch.compile(model, backend="aot_eager")
    if way == "computed again":
        model.activation_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        model.zero_grad()
        loss = called(**parallel.shard({"input_ids": ids(), "labels": ids()}, lengths=(17, 0, 44))).loss
        loss.backward()
    parallel.sum_gradients()
    assert counters["stats"]["unique_graphs"] > 1
    return loss.item(), gradients(model)


@pytest.mark.parametrize("way", ["whole", "layers", "computed again"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model(kind: str, way: str) -> None:
    """torch.compile changes neither loss nor gradients: graphs end where operations mix along the sequence."""
    want = alone(kind, **SHORT[kind])
    for got in run(partial(compiled, kind=kind, way=way), 3):
        assert_same(got, want)

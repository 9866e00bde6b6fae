"""Training over real processes: wrappers that average gradients, and meshes of rows and slices."""

import warnings
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dist_attn import context_parallel
from dist_attn.comm import Communicator
from tests.adapters.test_context_parallel import (
    Gradients,
    Prepare,
    assert_same,
    flat,
    gradients,
    ids,
    in_bfloat16,
    made,
)
from tests.support.ranks import run_processes

pytestmark = pytest.mark.slow
KINDS = ("qwen3_next", "mamba2")
SHORT: dict[str, dict[str, Any]] = {  # to compile in seconds
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2},
    "mamba2": {"num_hidden_layers": 1},
}
ON_A_MESH = (*KINDS, "zamba2")  # whose layers share weights
WRAPPERS, MIXED = ("FSDP2", "DDP"), "FSDP2 in bfloat16"
MOST = 0.1  # as the norm of all gradients once they are clipped


class Step(NamedTuple):
    """The mean loss of the rows with gradients, and the norm of these with what is left of them once clipped."""

    whole: tuple[float, Gradients]
    clipped: tuple[float, Gradients]


def layers(model: Any) -> list[nn.Module]:
    """The layers of the decoder."""
    parts = (part for part in model.get_decoder().children() if isinstance(part, nn.ModuleList))
    return [layer for part in parts for layer in part]


def alone(kind: str, rows: int = 1, prepare: Prepare = lambda _: None, **options: Any) -> tuple[float, Gradients]:
    """The mean loss of the rows, each by itself, and its gradients."""
    model = made(kind, **options)
    prepare(model)
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


def averaged(model: Any, wrapper: str, mesh: DeviceMesh) -> Any:
    """The model in a wrapper that averages gradients over all ranks of the mesh."""
    if wrapper == "DDP":
        return DistributedDataParallel(model, find_unused_parameters=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if wrapper == MIXED else MixedPrecisionPolicy()
    for module in (*layers(model), model):
        fully_shard(module, mesh=mesh._flatten(), mp_policy=policy)
    return model


def whole(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of which ranks may hold a part each."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def on_a_mesh(comm: Communicator, kinds: Sequence[str]) -> dict[tuple[str, str], Step]:
    """A step of each type in each wrapper over 2 x 2 ranks: rows over one dimension, slices of each over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "slices"))
    row, steps = ids(2)[mesh["rows"].get_local_rank()][None], {}
    for kind, wrapper in product(kinds, (*WRAPPERS, MIXED)):
        model = made(kind)
        parallel = context_parallel(model, mesh["slices"], reduction="mean")
        wrapped = averaged(model, wrapper, mesh["rows", "slices"])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*returned a view tensor")
            loss = wrapped(**parallel.shard({"input_ids": row, "labels": row}, lengths=(61, 0))).loss
        loss.backward()
        found = {name: whole(grad) for name, grad in gradients(model).items()}
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), MOST)).item()
        clipped = {name: whole(grad) for name, grad in gradients(model).items()}
        mean = comm.all_reduce_sum(loss.detach()).item() / comm.size
        steps[kind, wrapper] = Step((mean, found), (norm, clipped))
    return steps


@cache
def over_a_mesh(*kinds: str) -> list[dict[tuple[str, str], Step]]:
    """What every rank has after a step of each of these types in each wrapper."""
    return run(partial(on_a_mesh, kinds=kinds), 4)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ON_A_MESH)
def test_wrappers_over_a_mesh(kind: str, wrapper: str) -> None:
    """Wrappers that average over rows and slices give the loss and gradients of one process on all rows."""
    for rank in over_a_mesh(*ON_A_MESH):
        assert_same(rank[kind, wrapper].whole, alone(kind, rows=2))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ON_A_MESH)
def test_gradients_are_clipped_over_a_mesh(kind: str, wrapper: str) -> None:
    """Gradients are clipped by the norm that they have in one process, on all ranks."""
    _, want = alone(kind, rows=2)
    norm = nn.utils.get_total_norm(want.values()).item()
    assert norm > 2 * MOST
    for rank in over_a_mesh(*ON_A_MESH):
        assert_same(rank[kind, wrapper].clipped, (norm, {name: grad * MOST / norm for name, grad in want.items()}))


@pytest.mark.parametrize("kind", ON_A_MESH)
def test_mixed_precision_over_a_mesh(kind: str) -> None:
    """Where FSDP2 computes in bfloat16, gradients are about as far from float32 as those of one process."""
    exact, theirs = flat([alone(kind, rows=2)]), flat([alone(kind, rows=2, prepare=in_bfloat16)])
    for rank in over_a_mesh(*ON_A_MESH):
        ours = flat([rank[kind, MIXED].whole])
        assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


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


COMPILED = {("qwen3_next", "layers"): (17, 44), ("mamba2", "whole"): (61, 0), ("mamba2", "computed again"): (17, 44)}
"""Types and ways, and how many tokens ranks have."""


def second_step(kind: str, way: str, lengths: Sequence[int], **options: Any) -> tuple[float, Gradients]:
    """The second loss of a compiled model, and its gradients: layer by layer, whole, or with layers computed again."""
    torch.compiler.reset()
    counters.clear()
    model = made(kind, **options)
    called, parallel = model, context_parallel(model, dist.group.WORLD)
    if way == "layers":
        for layer in layers(model):
            layer.compile(backend="aot_eager")
    else:
        called = torch.compile(model, backend="aot_eager")
    if way == "computed again":
        model.activation_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        model.zero_grad()
        loss = called(**parallel.shard({"input_ids": ids(), "labels": ids()}, lengths)).loss
        loss.backward()
    parallel.sum_gradients()
    assert counters["stats"]["unique_graphs"] > 1
    return loss.item(), gradients(model)


def second_steps(comm: Communicator) -> dict[tuple[str, str], tuple[float, Gradients]]:
    """The second steps of all `COMPILED`, in processes that load the compiler once."""
    return {one: second_step(*one, lengths, **SHORT[one[0]]) for one, lengths in COMPILED.items()}


@cache
def compiled() -> list[dict[tuple[str, str], tuple[float, Gradients]]]:
    """The second steps on each of two ranks."""
    return run(second_steps, 2)


@pytest.mark.parametrize(("kind", "way"), COMPILED)
def test_a_compiled_model(kind: str, way: str) -> None:
    """torch.compile changes neither loss nor gradients: graphs end where operations mix along the sequence."""
    want = alone(kind, **SHORT[kind])
    for rank in compiled():
        assert_same(rank[kind, way], want)

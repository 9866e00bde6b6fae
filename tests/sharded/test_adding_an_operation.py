"""The example of docs/adding-an-operation.md, as a package outside this project has it."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError, InputError, MismatchError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceCall
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close

PAGE = Path(__file__).resolve().parents[2] / "docs/adding-an-operation.md"
LENGTHS = [3, 0, 4, 1]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's file as a module."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path_factory.mktemp("outside") / "running_mean.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("running_mean", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["running_mean"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["running_mean"]


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, sum(LENGTHS), 3), (2, 3)
    x_BLD, total_BD = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x_BLD.requires_grad_(), total_BD.requires_grad_()


def _gradients(out: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor], share: float = 1.0) -> list[Tensor]:
    loss = out[0].square().sum() + share * out[1].square().sum()
    return list(torch.autograd.grad(loss, inputs))


def test_over_ranks_as_on_one(outside: ModuleType) -> None:
    """Outputs, the state and every gradient of uneven and empty slices are those of the definition on one rank."""
    x_BLD, total_BD = _inputs()
    want = [(total_BD + x_BLD[:, : t + 1].sum(1)) / (5 + t + 1) for t in range(x_BLD.shape[1])]
    out = outside.running_mean(x_BLD, total_BD, 5)
    assert_close(out[0], torch.stack(want, dim=1))
    whole = _gradients(out, (x_BLD, total_BD))
    layout = SequenceLayout.from_lengths(LENGTHS)

    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor, list[Tensor]]:
        x_BLD, total_BD = _inputs()
        part_BLD = x_BLD[:, slice(*layout.range(comm.rank))]
        mine = outside.running_mean(part_BLD, total_BD, 5, ops=ShardedSequenceOps(comm, layout))
        return mine[0].detach(), mine[1].detach(), _gradients(mine, (x_BLD, total_BD), 1 / comm.size)

    ranks = run_simulated(on_rank, len(LENGTHS))
    assert_close(torch.cat([mean for mean, _, _ in ranks], dim=1), out[0].detach())
    for _, after_BD, _ in ranks:
        assert_close(after_BD, out[1].detach(), kind="state")
    for at, gradient in enumerate(whole):
        assert_close(torch.stack([gradients[at] for *_, gradients in ranks]).sum(0), gradient, kind="gradient")


def test_what_ranks_have_in_common_is_compared(outside: ModuleType) -> None:
    """An argument that differs on one rank is named on every rank; packed documents are refused."""
    layout = SequenceLayout.from_lengths([2, 2])

    def on_rank(comm: Communicator) -> None:
        x_BLD, total_BD = torch.zeros(1, 2, 3), torch.zeros(1, 3)
        outside.running_mean(x_BLD, total_BD, comm.rank, ops=ShardedSequenceOps(comm, layout))

    with pytest.raises(MismatchError, match=r"running_mean .* seen is 0 on rank 0 and 1 on rank 1"):
        run_simulated(on_rank, 2)

    def with_a_function(comm: Communicator) -> None:
        given = torch.zeros(1, 2, 3), torch.zeros(1, 3), torch.sin
        outside.running_mean(*given, ops=ShardedSequenceOps(comm, layout))

    with pytest.raises(TypeError, match=r"cannot compare .* list it in of_rank"):
        run_simulated(with_a_function, 2)
    with pytest.raises(InputError, match="running_mean was given 1 packed documents"):
        outside.running_mean(torch.zeros(1, 2, 3), torch.zeros(1, 3), ops=LocalSequenceOps((0,)))


def test_a_call_without_a_form_is_refused() -> None:
    """A kind of call that nobody has registered a form for says how to."""

    class Unknown(SequenceCall[Tensor]):
        operation = "unknown"

    with pytest.raises(ConfigError, match="Unknown has no such form; register one: @local_form"):
        LocalSequenceOps().run(Unknown())


@pytest.mark.slow
def test_it_is_one_graph(outside: ModuleType) -> None:
    """The operation compiles with `fullgraph` on one process and over ranks, with the gradients that it has outside."""
    torch.compiler.reset()
    layout = SequenceLayout.from_lengths(LENGTHS)

    def on_rank(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        inputs, ops, own = _inputs(), ShardedSequenceOps(comm, layout), slice(*layout.range(comm.rank))

        def mean(x_BLD: Tensor, total_BD: Tensor) -> tuple[Tensor, Tensor]:
            return outside.running_mean(x_BLD[:, own], total_BD, ops=ops)

        runs = [mean, torch.compile(mean, fullgraph=True, backend="eager")]
        want, got = (_gradients(run(*inputs), inputs) for run in runs)
        return list(zip(got, want, strict=True))

    for pairs in (_compiled_alone(outside), *run_simulated(on_rank, len(LENGTHS), timeout_s=120.0)):
        for got, want in pairs:
            assert_close(got, want, kind="gradient")
    torch.compiler.reset()


def _compiled_alone(outside: ModuleType) -> list[tuple[Tensor, Tensor]]:
    inputs = _inputs()
    compiled = torch.compile(outside.running_mean, fullgraph=True, backend="eager")
    return [*zip(_gradients(compiled(*inputs), inputs), _gradients(outside.running_mean(*inputs), inputs), strict=True)]

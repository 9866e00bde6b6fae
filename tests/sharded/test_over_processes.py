"""Every operation, mode and exchange between real processes, over gloo and over MPI, is that of simulated ranks."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import KeyValueCache
from dist_attn.sharded import ShardedSequenceOps, SoftmaxExchange
from dist_attn.sharded.prefix_scan import ScanExchange
from tests.sharded.operation_cases import CASES, inputs_of
from tests.sharded.test_affine import on_rank
from tests.sharded.test_prefix_scan import EXCHANGES, hosts, on_a_rank
from tests.support.affine import AffineInputs
from tests.support.closeness import assert_close
from tests.support.ranks import Kind, run_ranks

LENGTHS, MEMORY_LENGTHS = (3, 0, 2), (0, 4, 1)
WITH_DOCUMENTS = [
    "linear, gated, from a state",
    "linear, full, gated, from a state",
    "softmax",
    "softmax, full",
    "convolve",
    "convolve, streaming",
    "gated scan",
    "selective scan",
]
WITH_A_MEMORY = ["linear, full, gated, from a state", "softmax", "softmax, full"]
DETERMINISTIC = ["linear", "linear, full, gated, from a state", "convolve", "convolve, streaming"]
OF_A_MEMORY = {"k", "v", "gate", "scale"}


@dataclass(frozen=True)
class _Run:
    """A case over three ranks, and in which mode."""

    case: str
    lengths: tuple[int, ...] = LENGTHS
    documents: tuple[int, ...] | None = None
    memory: tuple[int, ...] | None = None
    softmax: SoftmaxExchange = "reshuffle"
    deterministic: bool = False


RUNS = [
    *(_Run(name) for name in CASES),
    *(_Run(name, documents=(2, 4)) for name in WITH_DOCUMENTS),
    *(_Run(name, memory=MEMORY_LENGTHS) for name in WITH_A_MEMORY),
    *(
        _Run(name, softmax="ring", documents=documents)
        for name in ("softmax", "softmax, full")
        for documents in (None, (2,))
    ),
    *(_Run(name, lengths=(64, 0, 40), deterministic=True) for name in DETERMINISTIC),
]


def _results(comm: Communicator, run: _Run) -> list[Tensor]:
    """Outputs of this rank and the gradients of its inputs."""
    case = CASES[run.case]
    layout = SequenceLayout.from_lengths(run.lengths, run.documents)
    memory = layout if run.memory is None else SequenceLayout.from_lengths(run.memory)
    ops = ShardedSequenceOps(comm, layout, memory, softmax=run.softmax, deterministic=run.deterministic)
    names, whole = inputs_of(case, layout.total)
    leaves = {}
    for name, tensor in zip(names, whole, strict=True):
        own = tensor.detach()
        if name in case.sliced:
            start, stop = (memory if name in OF_A_MEMORY else layout).range(comm.rank)
            own = own.narrow(len(case.sliced[name][0]), start, stop - start)
        leaves[name] = own.clone().requires_grad_()
    outs = case.run(ops, leaves)
    torch.stack([(out * out.detach().cos()).sum() for out in outs]).sum().backward()
    grads = (torch.zeros_like(t) if t.grad is None else t.grad for t in leaves.values())
    return [*(out.detach() for out in outs), *grads]


def _stream(comm: Communicator) -> list[Tensor]:
    """Two blocks of exact attention over a cache that is spread over ranks."""
    layout, case = SequenceLayout.from_lengths(LENGTHS), CASES["softmax"]
    ops = ShardedSequenceOps(comm, layout)
    start, stop = layout.range(comm.rank)
    q, k, v = (t.detach()[:, :, start:stop] for t in inputs_of(case, layout.total)[1])
    first, cache = ops.softmax_attention_streaming(q, k, v, KeyValueCache(k[:, :, :0], v[:, :, :0]))
    second, _ = ops.softmax_attention_streaming(q, k, v, cache)
    return [first, second]


def _affine(comm: Communicator, kind: str, exchange: str) -> list[Tensor]:
    """An affine recurrence in turn, or by the back end's own scan."""
    layout = SequenceLayout.from_lengths((40, 0, 25))
    inputs = AffineInputs.random(kind, layout.total, channels=True)
    out, state, gradients = on_rank(comm, inputs, layout, exchange)
    return [out, state, *gradients.values()]


def _scan(comm: Communicator, exchange: ScanExchange) -> list[Tensor]:
    """What every rank gets before and after its state, and gradients."""
    return [t for tensors in on_a_rank(comm, exchange, "both") for t in tensors]


def everything(comm: Communicator) -> list[tuple[str, list[Tensor]]]:
    """All runs on one group, so that processes are started once."""
    return [
        *((f"{run}", _results(comm, run)) for run in RUNS),
        ("stream", _stream(comm)),
        *((f"{kind} {by}", _affine(comm, kind, by)) for kind in ("decay", "delta rule") for by in ("auto", "exscan")),
        *((f"{by}", _scan(comm, by)) for by in (*EXCHANGES, ScanExchange("two_level", hosts=hosts(2, 1)))),
    ]


@pytest.fixture(scope="module")
def simulated() -> list[list[tuple[str, list[Tensor]]]]:
    """All runs on simulated ranks."""
    return run_simulated(everything, 3)


@pytest.mark.parametrize("kind", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_every_operation_and_mode(kind: Kind, simulated: list[list[tuple[str, list[Tensor]]]]) -> None:
    """Between processes all have the results of simulated ranks, bit for bit but where MPI scans itself."""
    for threads, processes in zip(simulated, run_ranks(kind, everything, 3), strict=True):
        for (what, want), (_, got) in zip(threads, processes, strict=True):
            for index, (one, other) in enumerate(zip(want, got, strict=True)):
                assert_close(other, one, kind="gradient" if "exscan" in what else "exact", what=f"{what} {index}")

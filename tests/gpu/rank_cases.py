"""Ranks on a GPU: one over NCCL, several that share it over gloo, and commands over ranks.

Operations are those of `tests.sharded.operation_cases`, forward and every gradient, held to simulated ranks on the CPU.
"""

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import DEVICE, Cases, Row
from dist_attn.comm import Communicator, run_simulated
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from tests.gpu.judging import judged, name_of
from tests.gpu.model_cases import MODEL, SHARED, compared, dist_attn, write_book
from tests.sharded.operation_cases import CASES, inputs_of

__all__ = ["rank_cases"]

TIMEOUT_S = 120.0  # also for the kernels that a first call compiles, and on a busy machine
GROUPS = {1: (5,), 2: (3, 2), 3: (3, 0, 2), 4: (1, 2, 0, 2)}  # tokens of the ranks


def rank_cases(*, tiny: bool) -> Cases:
    """Operations over groups of ranks, then the rows of a book."""
    groups = [("gloo", ranks) for ranks in ((2,) if tiny else (2, 3, 4))]
    if DEVICE == "cuda":
        groups.insert(0, ("nccl", 1))
    cases: Cases = {
        f"operations, {backend}, {ranks} ranks, {name_of(dtype)}": partial(_operations, backend, dtype, ranks)
        for backend, ranks in groups
        for dtype in (torch.float64, torch.float32)
        if not tiny or dtype == torch.float64
    }
    commands = [(4, torch.float32), (1, torch.float32), (2, torch.float32), (1, torch.bfloat16)]
    return cases | {
        f"encode --ranks {ranks}, {name_of(dtype)}": partial(_encode, ranks, dtype, 3_000 if tiny else 200_000)
        for ranks, dtype in (commands[2:3] if tiny else commands)
    }


def _operations(backend: str, dtype: torch.dtype, ranks: int) -> Row:
    """The worst error over all operations, and what is known of those that are wrong or failed."""
    layout = SequenceLayout.from_lengths(GROUPS[ranks])
    wanted = run_simulated(lambda comm: _all_results(comm, layout, torch.float64, "cpu"), ranks)
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as pool:
        store = (Path(folder) / "store").as_uri()
        jobs = [(backend, rank, layout, store, dtype) for rank in range(ranks)]
        found = pool.starmap(_on_rank, jobs, chunksize=1)
    wrong, worst = {}, 0.0
    for name in _here():
        parts = [ranks_found[name] for ranks_found in found]
        if failed := [part for part in parts if isinstance(part, str)]:
            wrong[name] = failed[0]
            continue
        # Of all ranks together: a gradient of the first token alone may be nothing but rounding.
        row = judged(_joined([want[name] for want in wanted]), _joined(parts), dtype)
        worst = max([worst, *row["errors"].values()])
        if not row["right"]:
            wrong[name] = row["errors"]
    return {
        "worst": worst,
        "right": not wrong,
        "wrong": wrong,
        "left out, without scipy": sorted({*CASES} - {*_here()}),
    }


def _joined(ranks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The numbers of all ranks by name."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: torch.cat([rank[name].flatten() for rank in ranks if name in rank]) for name in names}


def _on_rank(backend: str, rank: int, layout: SequenceLayout, store: str, dtype: torch.dtype) -> dict[str, Any]:
    carrier = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    with TorchDistCommunicator.connect(
        backend, timeout_s=TIMEOUT_S, device=carrier, meeting=store, rank=rank, size=layout.size
    ) as comm:
        return _all_results(comm, layout, dtype, DEVICE)


def _all_results(comm: Communicator, layout: SequenceLayout, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """What this rank's part of every operation gives, with its gradients; of one that failed the words."""
    found: dict[str, Any] = {}
    for name in _here():
        try:
            found[name] = _results(comm, layout, name, dtype, device)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]
    return found


def _here() -> list[str]:
    """The operations that can be had: redistributions need scipy, which a machine with torch need not have."""
    return [name for name in CASES if find_spec("scipy") is not None or not name.startswith("softmax")]


def _results(
    comm: Communicator, layout: SequenceLayout, name: str, dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    case, (start, stop) = CASES[name], layout.range(comm.rank)
    leaves = {}
    for part, whole in zip(*inputs_of(case, layout.total), strict=True):
        own = whole.detach()
        if part in case.sliced:
            own = own.narrow(len(case.sliced[part][0]), start, stop - start)
        leaves[part] = own.to(device, dtype).clone().requires_grad_()
    outs = case.run(ShardedSequenceOps(comm, layout), leaves)
    torch.stack([(out * out.detach().cos()).sum() for out in outs]).sum().backward()
    results = {f"out {number}": out.detach() for number, out in enumerate(outs)}
    results |= {f"grad {part}": t.grad for part, t in leaves.items() if t.grad is not None}
    return {part: tensor.cpu() for part, tensor in results.items() if tensor.numel()}


def _encode(ranks: int, dtype: torch.dtype, size: int) -> Row:
    """Rows by ranks of a command that share the device, against those of one process on the CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        book, want, got = str(write_book(folder, size)), folder / "want.npy", folder / "got.npy"
        encode = ("encode", book, f"--model={MODEL}")
        dist_attn(*encode, f"--out={want}", "--device=cpu")
        where = (f"--device={SHARED if ranks > 1 else DEVICE}", f"--dtype={name_of(dtype)}")
        dist_attn(*encode, f"--out={got}", *where, ranks=ranks)
        return compared(want, got, dtype)

"""The names among which commands, settings and messages choose; no other file lists them."""

import re
from typing import Literal, get_args

CpuBackend = Literal["gloo", "mpi"]
GroupBackend = Literal["gloo", "nccl", "mpi"]
Backend = Literal["auto", "local", GroupBackend]
"""The way in which ranks exchange tensors: on CPUs alone, in any group, or (`local`) as the only rank.

`auto` is nccl between GPUs that each rank has for itself, mpi under mpiexec, and gloo otherwise.
"""


def check_device(name: str) -> str:
    """Return the name of a device if it is one on which a process can compute.

    `cuda` is a GPU of each rank's own, `cuda:N` the N-th for all ranks of a host, `auto` cuda where torch finds a GPU,
    else cpu.

    Raises: ValueError for another name.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name):
        raise ValueError(f"device is {name[:40]!r}; needed is auto, cpu, cuda or cuda:N")
    return name


Precision = Literal["auto", "float32", "bfloat16"]
"""The precision of products; states and sums stay float32.

`auto`: bfloat16 on GPUs, and of encoders on CPUs that have it; else float32.
"""

StateExchange = Literal["auto", "pair", "gather", "exscan", "log_step", "two_level", "pipelined_ring", "serial_ring"]
"""The exchange by which ranks that share a text hand on their states; `auto` takes the one measured fastest."""

WeightPrecision = Literal["float32", "bfloat16", "int8"]
"""The precision in which a model's weights lie in memory while it reads and writes."""

LogLevel = Literal["debug", "info", "warning", "error"]
"""The least severe lines that are logged."""

BACKENDS: tuple[str, ...] = get_args(Backend)
EXCHANGES: tuple[str, ...] = get_args(StateExchange)

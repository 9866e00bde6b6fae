"""The names among which commands, settings and messages choose: each list stands here alone."""

import re
from typing import Literal, get_args

CpuBackend = Literal["gloo", "mpi"]
GroupBackend = Literal["gloo", "nccl", "mpi"]
Backend = Literal["auto", "local", GroupBackend]
"""How ranks talk to each other: on CPUs alone, in any group, or (`local`) as the only one.

`auto` is nccl between GPUs that each rank has for itself, mpi under mpiexec, and gloo otherwise.
"""


def check_device(name: str) -> str:
    """The name of what a process computes on, if it is one.

    `cuda` is a GPU of each rank's own, `cuda:N` the N-th for all ranks of a host, `auto` cuda where torch finds a GPU,
    else cpu.

    Raises: ValueError for another name.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name):
        raise ValueError(f"device is {name[:40]!r}; needed is auto, cpu, cuda or cuda:N")
    return name


Precision = Literal["auto", "float32", "bfloat16"]
"""In which precision products are computed; states and sums stay float32. `auto`: bfloat16 on GPUs, float32 on CPUs."""

StateExchange = Literal["auto", "pair", "gather", "exscan", "log_step", "two_level", "pipelined_ring", "serial_ring"]
"""How ranks that share a text hand on what they have read; `auto` takes what was measured fastest."""

WeightPrecision = Literal["float32", "bfloat16", "int8"]
"""In which precision a model's weights lie in memory while it reads and writes."""

LogLevel = Literal["debug", "info", "warning", "error"]
"""The least severe lines that are logged."""

BACKENDS: tuple[str, ...] = get_args(Backend)
EXCHANGES: tuple[str, ...] = get_args(StateExchange)

"""The names among which commands, settings and messages choose: each list stands here alone."""

from typing import Literal, get_args

CpuBackend = Literal["gloo", "mpi"]
GroupBackend = Literal["gloo", "nccl", "mpi"]
Backend = Literal["local", GroupBackend]
"""How ranks talk to each other: on CPUs alone, in any group, or (`local`) as the only one."""

StateExchange = Literal["auto", "pair", "gather", "exscan", "log_step", "two_level", "pipelined_ring", "serial_ring"]
"""How ranks that share a text hand on what they have read; `auto` takes what was measured fastest."""

WeightPrecision = Literal["float32", "bfloat16", "int8"]
"""In which precision a model's weights lie in memory while it reads and writes."""

LogLevel = Literal["debug", "info", "warning", "error"]
"""The least severe lines that are logged."""

BACKENDS: tuple[str, ...] = get_args(Backend)
EXCHANGES: tuple[str, ...] = get_args(StateExchange)

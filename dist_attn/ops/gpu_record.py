"""The record of runs on GPUs: one for each device's name in gpu_record.json, written by the GPU check (`make gpu`).

"auto" goes by it, so that no user's work is the first to run a kernel on a device: kernels and captured steps are taken
where they ran right, in the tiles that were fastest there.
"""

import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import torch

from dist_attn.ops.kernel_target import kernel_target

FILE = Path(__file__).with_name("gpu_record.json")

# Kernels of relative attention may be wrong on a device where those of linear attention are right; "fla" is linear
# attention by flash-linear-attention's kernels; those of affine recurrences are wrong or right one by one.
FlaOperation = Literal["fla_simple_gla", "fla_gla", "fla_gated_delta", "fla_kda", "fla_dplr", "fla_rwkv6"]
Operation = Literal["linear", "relative", "affine", "fla"] | FlaOperation


@dataclass(frozen=True, kw_only=True)
class GpuRecord:
    """The findings of the GPU check on devices of one name.

    kernels         the worst error of every case that came out right, the words of a failure of any other. A case's
                    name begins with its operation: "linear causal bfloat16 ...".
    captured_steps  whether decode steps replayed as a CUDA graph came out right; None where none was tried.
    tiles           the fields of the fastest `Tiles`, by `tiles_key`.
    commit          that of the last run.
    ratios          by case ("bfloat16 forward and backward gated"), milliseconds of this project's kernels ("ours_ms")
                    and of flash-linear-attention's ("fla_ms"). Those of affine recurrences begin with the operation
                    ("fla_kda bfloat16 forward").
    """

    driver: str
    torch: str
    triton: str
    commit: str
    kernels: dict[str, float | str] = field(default_factory=dict)
    captured_steps: bool | None = None
    tiles: dict[str, dict[str, int]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)

    def updated(self, found: "GpuRecord") -> "GpuRecord":
        """This record after another run of the check, which may have been of some parts only.

        An operation's cases are replaced together. What ran right says nothing about another driver, torch or Triton,
        so it is kept only where these are the same; times are kept until they are taken again.
        """
        same = (self.driver, self.torch, self.triton) == (found.driver, found.torch, found.triton)
        again = {_operation(case) for case in found.kernels}
        kept = {case: outcome for case, outcome in self.kernels.items() if same and _operation(case) not in again}
        captured = self.captured_steps if same and found.captured_steps is None else found.captured_steps
        return replace(
            found,
            kernels={**kept, **found.kernels},
            captured_steps=captured,
            tiles={**self.tiles, **found.tiles},
            ratios={**self.ratios, **found.ratios},
        )

    def cases_of(self, operation: Operation) -> dict[str, float | str]:
        """The part of `kernels` that is about this operation."""
        return {case: found for case, found in self.kernels.items() if _operation(case) == operation}


def record_of(device: torch.device) -> GpuRecord | None:
    """The record of devices of this one's name; None for a GPU that has none, and for what is no GPU."""
    if (target := kernel_target()) is not None:
        return _records(FILE).get(target.name)
    return _records(FILE).get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def recorded_names() -> tuple[str, ...]:
    """The names of devices that there are records of."""
    return tuple(_records(FILE))


def why_not_proven(operation: Operation, device: torch.device) -> str | None:
    """The reason why Triton's kernels are not proven on this GPU, in words; None where all of them ran right."""
    return why_not_right(operation, torch.cuda.get_device_name(device), record_of(device))


def why_not_right(operation: Operation, name: str, record: GpuRecord | None) -> str | None:
    """`why_not_proven` by the record of devices of this name."""
    cases = {} if record is None else record.cases_of(operation)
    whose = "flash-linear-attention's" if operation.startswith("fla") else "Triton's"
    if not cases:
        return f"{whose} have not run on {name} yet: `make gpu` runs them"
    for case, found in cases.items():
        if isinstance(found, str):
            return f"{whose} did not come out right on {name} ({case}: {found})"
    return None


def keep_record(name: str, found: GpuRecord, file: Path = FILE) -> None:
    """Bring what the check found on a device of this name into the file, in one go; see `GpuRecord.updated`.

    Raises: OSError where the file cannot be written; msgspec.ValidationError where what is there is no record.
    """
    _records.cache_clear()
    records = dict(_records(file))
    records[name] = records[name].updated(found) if name in records else found
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(records, order="sorted"), indent=1) + b"\n")
    beside.replace(file)
    _records.cache_clear()


def _operation(case: str) -> str:
    return case.partition(" ")[0]


@cache
def _records(file: Path) -> dict[str, GpuRecord]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, GpuRecord]) if file.exists() else {}

"""The record of runs on GPUs: one for each device's name in gpu_record.json, written by the GPU check (`make gpu`).

What it says is wrong there "auto" does not take with the same Triton; what it does not say a trial in the process finds
out (`ops.trial`). Captured steps are taken where they ran right, kernels in the tiles that were fastest, and
flash-linear-attention's for linear attention where they were right and faster.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import torch

from dist_attn.ops.kernel_target import kernel_target
from dist_attn.shipped.folder_files import put_in_place

FILE = Path(__file__).with_name("gpu_record.json")

# Of affine recurrences by flash-linear-attention's kernels, which are wrong or right one by one. Other operations are
# "linear", "affine", "fla" (linear attention by those kernels), and what packages name.
FlaOperation = Literal["fla_simple_gla", "fla_gla", "fla_gated_delta", "fla_kda", "fla_dplr", "fla_rwkv6"]


@dataclass(frozen=True, kw_only=True)
class GpuRecord:
    """The findings of the GPU check on devices of one name.

    kernels         the worst error of every case that came out right, the words of a failure of any other. A case's
                    name begins with its operation: "linear causal gaussian bfloat16 ...".
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

    def wrong(self, begins: str) -> str | None:
        """The first case whose name begins so that did not come out right, and what it came to; None without one."""
        cases = (f"{case}: {found}" for case, found in self.kernels.items() if isinstance(found, str))
        return next((case for case in cases if case.startswith(begins)), None)


def record_of(device: torch.device) -> GpuRecord | None:
    """The record of devices of this one's name; None for a GPU that has none, and for what is no GPU."""
    if (target := kernel_target()) is not None:
        return _records(FILE).get(target.name)
    return _records(FILE).get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def recorded_names() -> tuple[str, ...]:
    """The names of devices that there are records of."""
    return tuple(_records(FILE))


def why_wrong(begins: str, device: torch.device, triton: str) -> str | None:
    """The first wrong case with this beginning, on such GPUs with this Triton, in words, or None."""
    record = record_of(device)
    wrong = None if record is None or record.triton != triton else record.wrong(f"{begins} ")
    if wrong is None:
        return None
    return f"Triton's did not come out right on {torch.cuda.get_device_name(device)} ({wrong})"


def why_not_right(operation: str, name: str, record: GpuRecord | None) -> str | None:
    """The reason why kernels are not proven on devices of this name by their record; None where all cases are right."""
    whose = "flash-linear-attention's" if operation.startswith("fla") else "Triton's"
    if record is None or not any(_operation(case) == operation for case in record.kernels):
        return f"{whose} have not run on {name} yet: `make gpu` runs them"
    wrong = record.wrong(f"{operation} ")
    return None if wrong is None else f"{whose} did not come out right on {name} ({wrong})"


def keep_record(name: str, found: GpuRecord, file: Path = FILE) -> None:
    """Bring what the check found on a device of this name into the file, in one go; see `GpuRecord.updated`.

    Raises: OSError where the file cannot be written; msgspec.ValidationError where what is there is no record.
    """
    _records.cache_clear()
    records = dict(_records(file))
    records[name] = records[name].updated(found) if name in records else found
    put_in_place(file, msgspec.json.format(msgspec.json.encode(records, order="sorted"), indent=1) + b"\n")
    _records.cache_clear()


def _operation(case: str) -> str:
    return case.partition(" ")[0]


@cache
def _records(file: Path) -> dict[str, GpuRecord]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, GpuRecord]) if file.exists() else {}

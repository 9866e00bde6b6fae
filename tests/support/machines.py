"""Machines that are not there: calls on tensors without memory, which say that they lie on such a machine's GPU."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_attn.ops import fla_known, gpu_record, trial
from dist_attn.ops.gpu_record import GpuRecord
from dist_attn.ops.linear_attention import implementation

__all__ = ["Machine", "pinned"]

NAME = "a GPU"


def pinned(package: str) -> str:
    """The version that the checks run with."""
    text = Path(__file__).parents[2].joinpath("constraints.txt").read_text()
    found = re.search(rf"^{re.escape(package)}==(\S+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


@dataclass(frozen=True)
class Machine:
    """A CPU, or with a compute capability a GPU with these versions; without `fla` that is not installed."""

    capability: tuple[int, int] | None = None
    triton: str = ""
    fla: str = ""

    @property
    def device(self) -> torch.device:
        """Where its calls lie."""
        return torch.device("cpu") if self.capability is None else torch.device("cuda", 0)

    @contextmanager
    def entered(self, *, record: GpuRecord | None = None, outcome: str | None = None) -> Iterator[None]:
        """Operations choose as they do there; `record` is what `make gpu` found, `outcome` that of every trial."""
        with pytest.MonkeyPatch.context() as patch:
            fla_known.surroundings_of.cache_clear()
            patch.setattr(fla_known, "_triton", lambda: self.triton)
            patch.setattr(fla_known, "_fla", lambda: self.fla)
            patch.setattr(torch.cuda, "get_device_capability", lambda device=None: self.capability)
            patch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
            patch.setattr(gpu_record, "_records", lambda file: {} if record is None else {NAME: record})
            patch.setattr(implementation, "find_spec", lambda name: object() if name != "fla" or self.fla else None)
            patch.setattr(trial, "tried", lambda kind, compare: outcome)
            patch.setattr(trial, "_outcomes", {})
            patch.setattr(trial, "_ended", False)
            with nullcontext() if self.capability is None else FakeTensorMode():
                yield
        fla_known.surroundings_of.cache_clear()

"""A table of what flash-linear-attention refuses or computes wrong, by its version, Triton's, the GPU and the type.

It is read before anything is tried: a small trial does not meet what goes wrong only in large grids, or now and then.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from dist_attn.ops.gpu_record import FlaOperation

UNKNOWN = "of an unknown version"

__all__ = ["KNOWN", "Asked", "Surroundings", "surroundings_of", "why_known_not"]


@dataclass(frozen=True)
class Surroundings:
    """The place where kernels run: the versions, and the GPU's compute capability, None in Triton's interpreter."""

    triton: str
    fla: str
    capability: tuple[int, int] | None

    @property
    def hopper(self) -> bool:
        """Return whether the GPU is an H100 or its like."""
        return self.capability is not None and self.capability[0] == 9

    @property
    def blackwell(self) -> bool:
        """Return whether the GPU is a B200, a GeForce 50 or their like."""
        return self.capability is not None and self.capability[0] in (10, 11, 12)


@dataclass(frozen=True)
class Asked:
    """A call as one of flash-linear-attention's operations; `dtype` is that of its products."""

    operation: FlaOperation
    dtype: torch.dtype
    gradients: bool
    gated: bool = True
    by_name: bool = False


# In each line what is said, with the versions in braces, and when it holds.
KNOWN: tuple[tuple[str, Callable[[Asked, Surroundings], bool]], ...] = (
    (
        "flash-linear-attention {fla} is here: 0.5 is the first that is accepted",
        lambda asked, on: _older(on.fla, 0, 5),
    ),
    (
        "Triton {triton} is here: 3.4 is the first that is accepted",
        lambda asked, on: _older(on.triton, 3, 4),
    ),
    (
        "flash-linear-attention keeps states between chunks in the inputs' type, and float16's range is too small",
        lambda asked, on: asked.dtype == torch.float16,
    ),
    (
        "flash-linear-attention multiplies float32 as TF32, with three digits, so that it computes it by name alone",
        lambda asked, on: asked.dtype == torch.float32 and not asked.by_name,
    ),
    (
        "GPUs older than Ampere have no bfloat16",
        lambda asked, on: on.capability is not None and on.capability < (8, 0) and asked.dtype == torch.bfloat16,
    ),
    (
        "on Hopper GPUs Triton {triton} gets gradients of calls with one decay for a head wrong: 3.7.1 does not",
        lambda asked, on: (
            on.hopper
            and asked.gradients
            and asked.gated
            and asked.operation in ("fla_simple_gla", "fla_gated_delta")
            and _older(on.triton, 3, 7, 1)
        ),
    ),
    (
        "on Blackwell GPUs loops of products race with Triton {triton}: those of 3.8 do not",
        lambda asked, on: on.blackwell and _older(on.triton, 3, 8),
    ),
)


def why_known_not(asked: Asked, on: Surroundings) -> str | None:
    """The reason why flash-linear-attention is known not to compute this, or not rightly; None where nothing is known.

    References: flash-linear-attention's own refusals, and its issues 640 (Hopper), 913, 945 and 1228 (Blackwell).
    """
    words = next((words for words, holds in KNOWN if holds(asked, on)), None)
    return None if words is None else words.format(fla=on.fla, triton=on.triton)


@cache
def surroundings_of(device: torch.device) -> Surroundings:
    """Look up the versions of both packages, which are installed, and the device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Surroundings(_triton(), _fla(), capability)


def _triton() -> str:
    """The version that Triton says it is: torch's builds of it are distributions of other names, and trees are none."""
    found = import_module("triton") if find_spec("triton") is not None else None
    return str(getattr(found, "__version__", UNKNOWN))


def _fla() -> str:
    """The version that its distribution says it is, of either name: importing it takes seconds."""
    for package in ("fla-core", "flash-linear-attention"):
        with suppress(PackageNotFoundError):
            return version(package)
    return UNKNOWN


def _older(found: str, *than: int) -> bool:
    """Return whether a version is older; one that is not known is refused as if it were."""
    return tuple(map(int, re.findall(r"\d+", found)[: len(than)])) < than

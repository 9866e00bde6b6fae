"""What affine recurrences must give on a GPU: those of the streaming form in float64, outputs, state and gradients.

Our streaming form, and flash-linear-attention's kernels, of the heads that are timed: kernels are compiled and their
tiles chosen for these.
"""

from functools import partial

import torch

from benchmarks.gpu.cases import DEVICE, Cases, Row
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.linear_attention import Implementation
from tests.gpu.judging import judged, name_of
from tests.support.affine import AffineInputs

__all__ = ["affine_cases", "fla_affine_cases"]

OPERATIONS = {
    "gated_delta": ("delta rule", False),
    "kda": ("delta rule", True),
    "gla": ("decay", True),
    "dplr": ("erasing", True),
    "rwkv6": ("decay, read before", True),
    "simple_gla": ("decay", False),
}
SIZES, LENGTH, CUTS = (1, 16, 128, 128), 1_003, (5, 64, 700)


def affine_cases(*, tiny: bool) -> Cases:
    """The streaming form; the first word of a name is the operation, as the record has it."""
    sizes, length, cuts = ((1, 2, 8, 8), 21, (3, 17)) if tiny else (SIZES, LENGTH, CUTS)
    return {
        f"affine {name} {name_of(dtype)} {_words(sizes)}": partial(
            _affine, "streaming", kind, dtype, sizes, length, cuts
        )
        for name, kind in OPERATIONS.items()
        for dtype in ((torch.float32,) if tiny else (torch.float32, torch.bfloat16))
    }


def fla_affine_cases() -> Cases:
    """What `auto` may take of flash-linear-attention, likewise."""
    return {
        f"fla_{name} bfloat16 {_words(SIZES)} documents={len(documents)}": partial(
            _affine, "fla", kind, torch.bfloat16, SIZES, LENGTH, documents
        )
        for name, kind in OPERATIONS.items()
        for documents in (((), CUTS) if name == "gated_delta" else ((),))
    }


def _words(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _affine(
    implementation: Implementation,
    kind: tuple[str, bool],
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    length: int,
    documents: tuple[int, ...],
) -> Row:
    inputs = AffineInputs.random(kind[0], length, channels=kind[1], sizes=sizes, dtype=torch.float32)
    for name, t in inputs.sequence.items():
        inputs.sequence[name] = t.to(DEVICE, torch.float32 if name in ("log_decay", "beta") else dtype)
    weight, found = torch.randn(inputs.sequence["v"].shape, device=DEVICE), []
    exact: Implementation = "streaming"
    for wide, one in ((True, exact), (False, implementation)):
        leaves = AffineInputs(
            inputs.kind,
            {n: (t.double() if wide else t.clone()).requires_grad_() for n, t in inputs.sequence.items()},
            {
                n: t.to(DEVICE, torch.float64 if wide else t.dtype).requires_grad_()
                for n, t in inputs.replicated.items()
            },
        )
        out, after = leaves.run(LocalSequenceOps(documents, one))
        ((out.double() * weight).sum() + after.s_BHKV.double().square().mean()).backward()
        grads = {f"grad {name}": t for name, t in leaves.gradients().items()}
        found.append({"out": out, "state": after.s_BHKV, **grads})
    return judged(found[0], found[1], dtype)

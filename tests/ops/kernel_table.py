"""`python -m tests.ops.kernel_table`: the table of what computes what on which device, as operations choose it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from dist_attn.ops import Denominator, LocalSequenceOps
from dist_attn.ops.affine import AffineCall
from dist_attn.ops.affine.implementation import choose
from dist_attn.ops.linear_attention import LinearCall
from dist_attn.ops.linear_attention.implementation import Choice, choose_attention
from dist_attn.ops.linear_attention.native_call import KernelCall
from tests.support.machines import Machine, pinned

__all__ = ["BEGIN", "END", "PAGE", "section"]

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/gpus.md"
BEGIN, END = "<!-- kernels: begin; written by `python -m tests.ops.kernel_table` -->\n", "<!-- kernels: end -->\n"

TRITON, FLA = pinned("triton"), pinned("fla-core")
MACHINES = {
    "CPU": Machine(),
    f"A100, Triton {TRITON}": Machine((8, 0), TRITON, FLA),
    "H100, Triton 3.6.0": Machine((9, 0), "3.6.0", FLA),
    f"H100, Triton {TRITON}": Machine((9, 0), TRITON, FLA),
    f"B200, Triton {TRITON}": Machine((10, 0), TRITON, FLA),
    "GPUs without flash-linear-attention": Machine((9, 0), TRITON),
}
WORDS = {"native": "C", "triton": "Triton", "fla": "fla", "streaming": "torch"}
LENGTH, HEADS, SIZE = 128, 2, 16

Operation = Callable[[torch.device, bool], Choice]


def _tensors(device: torch.device, gradients: bool, *sizes: int) -> list[torch.Tensor]:
    """[1, H, L, size] of each size: bfloat16 on a GPU, as there by default."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = (1, HEADS, LENGTH)
    return [torch.zeros(*shape, size, device=device, dtype=dtype, requires_grad=gradients) for size in sizes]


def _linear(device: torch.device, gradients: bool, *, gated: bool = False) -> Choice:
    q, k, v = _tensors(device, gradients, SIZE, SIZE, SIZE)
    gate = torch.zeros(1, HEADS, LENGTH, device=device) if gated else None
    return choose_attention(LinearCall(q, k, v, gate, denominator=Denominator()))


def _affine(device: torch.device, gradients: bool, *, vector: bool, delta: bool, erase: bool, before: bool) -> Choice:
    q, k, v, a, b = _tensors(device, gradients, *5 * (SIZE,))
    decay = torch.zeros(1, HEADS, LENGTH, SIZE if vector else 1, device=device)
    beta = torch.zeros(1, HEADS, LENGTH, device=device) if delta else None
    return choose(AffineCall(q, k, v, decay, (a, b) if erase else None, beta, read="before" if before else "after"))


def _recurrence(*, vector: bool = True, delta: bool = False, erase: bool = False, before: bool = False) -> Operation:
    return partial(_affine, vector=vector, delta=delta, erase=erase, before=before)


def _softmax(x_BLD: torch.Tensor) -> object:
    return LocalSequenceOps().softmax_attention(*3 * (x_BLD[:, None],), causal=True)


def _selective(x_BLD: torch.Tensor) -> object:
    rates, many = torch.zeros(SIZE, 4, device=x_BLD.device), x_BLD[..., :4]
    return LocalSequenceOps().selective_scan(x_BLD, x_BLD, rates, many, many)


def _convolution(x_BLD: torch.Tensor) -> object:
    return LocalSequenceOps().convolve_streaming(x_BLD, torch.zeros(4, SIZE, device=x_BLD.device))


def _without_choice(operation: Callable[[torch.Tensor], object], device: torch.device, gradients: bool) -> Choice:
    """It is run, and calls C kernels or not; there are no others of it, and none for gradients alone."""
    device = device if device.type == "cpu" else torch.device("meta")  # which has memory as little, and takes views
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelCall, "run", lambda call, name, backward=False: called.append(name))
        operation(torch.zeros(1, LENGTH, SIZE, device=device))
    return Choice("native" if called else "streaming", "")


OPERATIONS: dict[str, Operation] = {
    "linear attention": _linear,
    "linear attention, gated": partial(_linear, gated=True),
    "one decay for a head (Lightning, Mamba-2)": _recurrence(vector=False),
    "a decay for each channel (GLA)": _recurrence(),
    "gated delta rule": _recurrence(vector=False, delta=True),
    "delta rule with a decay for each channel (KDA)": _recurrence(delta=True),
    "any erasure of rank one (DPLR, RWKV-7)": _recurrence(erase=True),
    "a state read before its token (RWKV-6)": _recurrence(before=True),
    "exact attention": partial(_without_choice, _softmax),
    "selective scan (Mamba)": partial(_without_choice, _selective),
    "short convolution": partial(_without_choice, _convolution),
}


def section() -> str:
    """The table, and in numbered notes why torch computes what kernels exist for."""
    notes: dict[str, int] = {}
    rows = []
    for name, operation in OPERATIONS.items():
        cells = [_cell(operation, machine, notes) for machine in MACHINES.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    head = f"| | {' | '.join(MACHINES)} |\n{'|---' * (1 + len(MACHINES))}|"
    numbered = "\n".join(f"{number}. {reason}" for reason, number in notes.items())
    return f"{BEGIN}\n{head}\n" + "\n".join(rows) + f"\n\n{numbered}\n\n{END}"


def _cell(operation: Operation, machine: Machine, notes: dict[str, int]) -> str:
    with machine.entered():
        found = [operation(machine.device, gradients) for gradients in (False, True)]
    words = [_words(choice, machine, notes) for choice in found]
    return words[0] if words[0] == words[1] else f"{words[0]}; {words[1]} in training"


def _words(choice: Choice, machine: Machine, notes: dict[str, int]) -> str:
    word = WORDS[choice.implementation]
    if choice.implementation != "streaming" or not choice.reason or machine.capability is None:
        return word
    reason = choice.reason.partition(";")[0]  # without what to do about it, which depends on how this is installed
    return f"{word} ({notes.setdefault(reason, 1 + len(notes))})"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + section() + rest.partition(END)[2])

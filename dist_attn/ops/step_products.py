"""Products of a decode step with float32 weights by C kernels: few rows, and all the weights of a model to be read.

torch's products read weights of 100M parameters in 23 ms for one row and in 42 for eight, these in 14 and in 27 (EPYC,
one thread), where the memory's limit is 13. Here an output has the same bits whatever other rows there are.

Shape letters: N rows, C choices of a row, E matrices, I inputs, O outputs.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from dist_attn.ops.c_call import is_plain
from dist_attn.ops.c_library import NoLibraryError, load_library

__all__ = ["step_products", "step_products_naive", "takes_step_products"]


def takes_step_products(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether there are kernels of these: float32 in plain memory of a processor, no derivatives asked for."""
    return (
        x.dtype == w.dtype == torch.float32
        and x.device.type == w.device.type == "cpu"
        and x.shape[-1] == w.shape[-1]
        and w.numel() > 0
        and w.is_contiguous()
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))
        and is_plain(x)
        and is_plain(w)
        and _kernel() is not None
    )


def step_products(x_NI: torch.Tensor, w: torch.Tensor, chosen_NC: torch.Tensor | None = None) -> torch.Tensor:
    """Rows times the weights w [O, I], or each times those of w [E, O, I] that were chosen for it.

    `takes_step_products` says whether it can be called; nothing checks that `chosen` are in [0, E).

    Shapes: x [N, I], w [O, I] -> [N, O]; with w [E, O, I] and chosen [N, C] -> [N, C, O].
    """
    kernel = _kernel()
    assert kernel is not None
    outputs, inputs = w.shape[-2:]
    shape = (len(x_NI),) if chosen_NC is None else tuple(chosen_NC.shape)
    x_NI = x_NI.contiguous()
    chosen_NC = None if chosen_NC is None else chosen_NC.to(torch.int64).contiguous()
    y = x_NI.new_empty((*shape, outputs))
    rows = y.numel() // outputs
    room = torch.empty((2, rows), dtype=torch.int64, device="cpu")  # for pointers
    kernel(
        x_NI.data_ptr(),
        w.data_ptr(),
        y.data_ptr(),
        None if chosen_NC is None else chosen_NC.data_ptr(),
        room.data_ptr(),
        room.data_ptr() + 8 * rows,
        rows,
        max(1, rows // max(1, len(x_NI))),
        outputs,
        inputs,
        torch.get_num_threads(),
    )
    return y


def step_products_naive(x_NI: torch.Tensor, w: torch.Tensor, chosen_NC: torch.Tensor | None = None) -> torch.Tensor:
    """See `step_products`."""
    if chosen_NC is None:
        return x_NI @ w.T
    return torch.stack([torch.stack([w[number] @ x for number in row]) for x, row in zip(x_NI, chosen_NC, strict=True)])


@lru_cache(maxsize=1)
def _kernel() -> "ctypes._NamedFuncPointer | None":
    try:
        library = load_library(Path(__file__).parent / "csrc" / "step_products.c")
    except NoLibraryError:
        return None
    kernel = library.dist_attn_step_products
    kernel.argtypes, kernel.restype = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 5, None
    return kernel

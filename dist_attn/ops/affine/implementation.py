"""The choice of an implementation for a call of an affine recurrence, and the reason: its name or the tensors."""

import torch

from dist_attn.ops.affine.call import AffineCall
from dist_attn.ops.affine.native import kernels
from dist_attn.ops.c_library import NoLibraryError
from dist_attn.ops.gpu_record import FlaOperation, GpuRecord, record_of
from dist_attn.ops.linear_attention.implementation import (
    FLA_DTYPES,
    LARGEST,
    NATIVE_DTYPES,
    NATIVE_LARGEST,
    Choice,
    resolve,
    why_case_not_faster,
    why_no_fla,
    why_not_for_c,
)

__all__ = ["choose", "fla_operation", "why_not_faster"]


def choose(call: AffineCall) -> Choice:
    """Choose the implementation of a call: the one asked for by name; "auto" takes C kernels for tensors of a CPU.

    On a GPU "auto" takes flash-linear-attention's kernels, where the record of such devices has them as right and
    faster. A call without tokens is one of the streaming form, unless with tokens it would be refused.

    Raises: ConfigError for an implementation that does not exist, and for kernels that were asked for by name and
        cannot take this call; the message says why.
    """
    device = call.v_BHLV.device
    choice = resolve(
        call.implementation,
        "affine",
        device,
        lambda: "there are no Triton kernels of affine recurrences",
        lambda: _unsupported_by_c(call) or why_no_library(),
        why_not_fla=lambda: why_no_fla(call.v_BHLV, interpreted_is_fine=True) or _unsupported_by_fla(call),
    )
    if not call.tokens:
        return Choice("streaming", "there are no tokens")
    if call.implementation != "auto" or device.type != "cuda":
        return choice
    reason = (
        why_not_faster(call, torch.cuda.get_device_name(device), record_of(device))
        or why_no_fla(call.v_BHLV, interpreted_is_fine=False)
        or _unsupported_by_fla(call)
    )
    return choice if reason is not None else Choice("fla", "flash-linear-attention was faster on this GPU")


def fla_operation(call: AffineCall) -> FlaOperation | None:
    """The operation of flash-linear-attention that a call is, if any; a decay is taken as a vector where it must be."""
    if call.read == "before":
        return None if call.erases else "fla_rwkv6"
    if call.erase is not None:
        return "fla_dplr" if call.beta_BHL is None else None
    vector = call.log_decay_BHLG.shape[3] > 1
    if call.beta_BHL is not None:
        return "fla_kda" if vector else "fla_gated_delta"
    return "fla_gla" if vector else "fla_simple_gla"


def why_not_faster(call: AffineCall, name: str, record: GpuRecord | None) -> str | None:
    """The reason why flash-linear-attention is not faster for a call on devices `name`, by their record, or None."""
    operation = fla_operation(call)
    if operation is None:
        return _unsupported_by_fla(call)
    state = None if call.state is None else call.state.s_BHKV
    tensors = (*call.sequence, call.bonus_HK, state)
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    dtype = str(call.v_BHLV.dtype).removeprefix("torch.")
    case = f"{operation} {dtype} forward{' and backward' * gradients}"
    return why_case_not_faster(operation, case, name, record)


def _unsupported_by_fla(call: AffineCall) -> str | None:
    """The reason why flash-linear-attention has no kernels of this call, or None."""
    if fla_operation(call) is None:
        return "the state is read before a token that erases from it: flash-linear-attention has no kernels of that"
    if call.sums_dtype() != torch.float32:
        return f"sums in {call.sums_dtype()} are asked for: the kernels' are float32"
    v = call.v_BHLV
    factors = (call.q_BHLK, call.k_BHLK, v, *(call.erase or ()))
    if any(t.dtype != v.dtype for t in factors) or v.dtype not in FLA_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLA_DTYPES)
        found = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in factors))
        return f"queries, keys, values and what erases are {found}: the kernels take one of {known} for all"
    state = None if call.state is None else call.state.s_BHKV
    if any(t is not None and t.device != v.device for t in (*call.sequence, call.bonus_HK, state)):
        return "the tensors are on different devices"
    sizes = call.k_BHLK.shape[3], v.shape[3]
    if not min(sizes) or sizes[0] > LARGEST:
        return f"the key size and values are {sizes}: the kernels take a key size of 1 to {LARGEST}, and some values"
    if v.dtype != torch.float32 and (sizes[0] % 2 or sizes[1] % 2):
        return f"the key size and values are {sizes}: in half precision the kernels take even sizes"
    return None if v.shape[0] and v.shape[1] else "there are no sequences or no heads"


def why_no_library() -> str | None:
    """The reason why this machine has no C kernels, or None; the first call compiles them."""
    try:
        kernels()
    except NoLibraryError as error:
        return str(error)
    return None


def _unsupported_by_c(call: AffineCall) -> str | None:
    """The reason why the C kernels cannot take a call, or None."""
    state = None if call.state is None else call.state.s_BHKV
    there = [t for t in (*call.sequence, call.bonus_HK, state) if t is not None]
    if (reason := why_not_for_c(there)) is not None:
        return reason
    if (other := next((t.dtype for t in there if t.dtype not in NATIVE_DTYPES), None)) is not None:
        return f"there is a tensor of {other}: the kernels take float32 and bfloat16"
    if state is not None and state.dtype != torch.float32:
        return f"the state is {state.dtype}: the kernels' sums are float32"
    if call.erase is not None and call.beta_BHL is not None:
        return "there are an erasure and a beta: the kernels take one of the two"
    sizes = call.state_shape[2:]
    if not 0 < min(sizes) <= max(sizes) <= NATIVE_LARGEST:
        return f"key size and values are {sizes}: the kernels take 1 to {NATIVE_LARGEST} of each"
    return None

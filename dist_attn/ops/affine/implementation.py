"""The choice of an implementation for a call of an affine recurrence, and the reason: its name or the tensors."""

from functools import partial

import torch

from dist_attn.ops.affine.call import AffineCall
from dist_attn.ops.affine.native import kernels
from dist_attn.ops.affine.trial import AffineKind, compared
from dist_attn.ops.c_library import NoLibraryError
from dist_attn.ops.fla_known import Asked, Surroundings, surroundings_of, why_known_not
from dist_attn.ops.gpu_record import FlaOperation, GpuRecord, record_of
from dist_attn.ops.linear_attention.implementation import (
    LARGEST,
    NATIVE_DTYPES,
    NATIVE_LARGEST,
    Choice,
    resolve,
    why_no_fla,
    why_not_for_c,
)
from dist_attn.ops.trial import Attempt, name_of, way_of, why_not_right_here

__all__ = ["attempt", "choose", "fla_operation", "recurrences_taken", "why_not_by_default"]

FEWEST = 64  # tokens of a chunk of flash-linear-attention's: of fewer it measures tiles again, and launches take longer


def choose(call: AffineCall) -> Choice:
    """Choose the implementation of a call: the one asked for by name; "auto" takes C kernels for tensors of a CPU.

    On a GPU "auto" takes flash-linear-attention's kernels unless something is known against them there or their trial
    (`trial`), which this begins, did not come out right. A call without tokens is one of the streaming form, unless
    with tokens it would be refused.

    Raises: ConfigError for an implementation that does not exist, and for kernels that were asked for by name and
        cannot take this call; the message says why.
    """
    device = call.v_BHLV.device
    choice = resolve(
        call.implementation,
        lambda: "there are no Triton kernels of affine recurrences",
        why_not_native=lambda: _unsupported_by_c(call) or why_no_library(),
        why_not_fla=lambda: (
            why_no_fla(call.v_BHLV, interpreted_is_fine=True)
            or _unsupported_by_fla(call)
            or why_known_not(_asked(call, by_name=True), surroundings_of(device))
        ),
    )
    if not call.tokens:
        return Choice("streaming", "there are no tokens")
    if call.implementation != "auto" or device.type != "cuda":
        return choice
    if call.tokens < FEWEST:
        return Choice(
            "streaming", f"there are {call.tokens} tokens: flash-linear-attention is taken for {FEWEST} or more"
        )
    if (reason := _why_not_fla(call)) is not None:
        return Choice("streaming", reason)
    return Choice("fla", "flash-linear-attention's came out right on this GPU")


def attempt(call: AffineCall) -> Attempt | None:
    """The trial that "auto" begins on a GPU, however few tokens there are; None for a call that kernels never take."""
    return None if fla_operation(call) is None else Attempt(_kind_of(call), lambda: _why_not_fla(call))


def _why_not_fla(call: AffineCall) -> str | None:
    device = call.v_BHLV.device
    reason = why_no_fla(call.v_BHLV, interpreted_is_fine=False)
    if reason is None:
        name = torch.cuda.get_device_name(device)
        reason = why_not_by_default(call, surroundings_of(device), name, record_of(device))
    if reason is not None:
        return reason
    kind = _kind_of(call)
    return why_not_right_here(kind, partial(compared, call, kind))


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


def why_not_by_default(call: AffineCall, on: Surroundings, name: str, record: GpuRecord | None) -> str | None:
    """The reason why flash-linear-attention does not compute a call by default on devices of this name, or None.

    Trials are not looked at. What `make gpu` has found counts for the Triton that it found it with; its cases are
    right or wrong with gradients.
    """
    if (reason := _unsupported_by_fla(call) or why_known_not(_asked(call, by_name=False), on)) is not None:
        return reason
    if record is None or record.triton != on.triton:
        return None
    asked = _asked(call, by_name=False)
    of = f"{asked.operation} {name_of(asked.dtype)} "
    if call.needs_gradients and (wrong := record.wrong(of)) is not None:
        return f"flash-linear-attention's did not come out right on {name} ({wrong})"
    case = f"{of}{way_of(call.needs_gradients)}"
    times = record.ratios.get(case, {})
    if times.get("ours_ms", float("inf")) <= times.get("fla_ms", 0.0):
        return f"the streaming form was faster on {name} ({case})"
    return None


def recurrences_taken(device: torch.device) -> str:
    """Name what "auto" computes affine recurrences with on a GPU, in words for the first line of a command."""
    reason = why_no_fla(torch.empty(0, device=device), interpreted_is_fine=False)
    if reason is None:
        on = surroundings_of(device)
        every = Asked("fla_kda", torch.bfloat16, gradients=False)
        reason = why_known_not(every, on)
    if reason is not None:
        return f"torch's operations; {reason}"
    return f"flash-linear-attention's {on.fla} in bfloat16, each where its trial comes out right"


def _asked(call: AffineCall, *, by_name: bool) -> Asked:
    operation = fla_operation(call)
    assert operation is not None  # `_unsupported_by_fla` comes first
    return Asked(operation, call.products_dtype(), call.needs_gradients, by_name=by_name)


def _kind_of(call: AffineCall) -> AffineKind:
    asked, (batch, heads, size, values) = _asked(call, by_name=False), call.state_shape
    sizes = (min(2, batch), heads, size, values)
    return AffineKind(call.v_BHLV.device, asked.operation, asked.dtype, sizes, bool(call.documents), asked.gradients)


def _unsupported_by_fla(call: AffineCall) -> str | None:
    """The reason why flash-linear-attention has no kernels of this call in any version, or None."""
    if fla_operation(call) is None:
        return "the state is read before a token that erases from it: flash-linear-attention has no kernels of that"
    if call.sums_dtype() != torch.float32:
        return f"sums in {call.sums_dtype()} are asked for: the kernels' are float32"
    v, dtype = call.v_BHLV, call.products_dtype()
    state = None if call.state is None else call.state.s_BHKV
    if any(t is not None and t.device != v.device for t in (*call.sequence, call.bonus_HK, state)):
        return "the tensors are on different devices"
    sizes = call.k_BHLK.shape[3], v.shape[3]
    if not min(sizes) or sizes[0] > LARGEST:
        return f"the key size and values are {sizes}: the kernels take a key size of 1 to {LARGEST}, and some values"
    if dtype != torch.float32 and (sizes[0] % 2 or sizes[1] % 2):
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

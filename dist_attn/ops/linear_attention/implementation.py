"""The choice of an implementation for a call of linear attention, and the reason: its name or the tensors.

Shape letters: B batch, H heads, S keys, V values.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from os import environ
from typing import Literal, get_args

import torch

from dist_attn.errors import ConfigError, extra_hint
from dist_attn.ops.c_library import NoLibraryError
from dist_attn.ops.feature_map import HasFusedForm
from dist_attn.ops.fla_known import Asked, surroundings_of, why_known_not
from dist_attn.ops.gpu_record import GpuRecord, record_of, why_not_right, why_wrong
from dist_attn.ops.kernel_target import kernel_target
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.native_call import kernels
from dist_attn.ops.linear_attention.trial import Form, LinearKind, compared
from dist_attn.ops.sequence_call import Implementation
from dist_attn.ops.trial import Attempt, Compare, Kind, name_of, way_of, why_not_right_here

IMPLEMENTATIONS = get_args(Implementation)
LARGEST = 256  # head size, values and projections of a map up to which the kernels' tiles are laid out
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
NATIVE_LARGEST = 1024  # a core's working space stays within some megabytes
FLA_DTYPES = (torch.float32, torch.bfloat16)  # states between chunks are of this type, and float16's range is too small
FLA_LEAD = 1.1  # so many times as long our kernels must have taken
ELSEWHERE = "the tensors are on"


@dataclass(frozen=True)
class Choice:
    """The implementation of a call, and the reason in words."""

    implementation: Literal["streaming", "native", "triton", "fla"]
    reason: str


def choose(call: LinearCall, *, sums: torch.dtype = torch.float32, form: Form | None = None) -> Choice:
    """Choose the implementation of a call: the one asked for by name; "auto" takes C kernels for tensors of a CPU.

    For tensors of a GPU it takes Triton's kernels unless they are known to be wrong there or their trial, which this
    begins, did not come out right. Where kernels cannot take the call, "auto" takes the
    streaming form. `sums` is the precision that is asked for at least; `form` what is computed, attention by default.

    Raises: ConfigError for an implementation that does not exist, and for kernels that were asked for by name and
        cannot take this call; the message says why.
    """
    by_name = call.implementation == "triton"
    return resolve(
        call.implementation,
        lambda: _why_not_triton(call, sums, interpreted_is_fine=by_name),
        lambda: _tried(call, form or ("causal" if call.causal else "full")),
        lambda: why_not_native(call, sums) or why_no_library(),
        lambda: (
            _why_no_fla(call, interpreted_is_fine=True)
            or _unsupported_sums(sums)
            or _unsupported_call(call, any_lengths=False)
            or _unsupported_types(call, FLA_DTYPES)
            or _known_of_fla(call, by_name=True)
        ),
    )


def why_not_native(call: LinearCall, sums: torch.dtype) -> str | None:
    """The reason why C kernels cannot take a call where there are any, or None."""
    return (
        why_not_for_c(call.tensors)
        or _unsupported_sums(sums)
        or _unsupported_call(call, any_lengths=True)
        or _unsupported_sizes(call, NATIVE_DTYPES, NATIVE_LARGEST)
    )


def attempt(call: LinearCall, form: Form, sums: torch.dtype = torch.float32) -> Attempt:
    """The trial that "auto" begins on a GPU for calls of this one's kind, however few tokens there are."""
    like = call.one_token()  # which all ranks have
    return Attempt(
        LinearKind.of(call, form),
        lambda: _why_not_triton(like, sums, interpreted_is_fine=False) or _tried(call, form),
    )


def _why_not_triton(call: LinearCall, sums: torch.dtype, *, interpreted_is_fine: bool) -> str | None:
    return (
        why_no_kernels(call.v_BHSV, interpreted_is_fine=interpreted_is_fine)
        or _unsupported_sums(sums)
        or _unsupported_call(call, any_lengths=False)
        or _unsupported_sizes(call, DTYPES, LARGEST)
    )


def _tried(call: LinearCall, form: Form) -> str | None:
    kind = LinearKind.of(call, form)
    return why_not_by_default(kind.case, kind, partial(compared, call, kind))


def why_not_by_default(case: str, kind: Kind, compare: Compare) -> str | None:
    """The reason why "auto" does not take Triton's kernels on a GPU: by its record, else by the trial of this kind.

    `case` is how the names of such cases begin in the record.
    """
    wrong = why_wrong(case, kind.device, surroundings_of(kind.device).triton)
    return wrong or why_not_right_here(kind, compare)


def choose_attention(call: LinearCall, *, form: Form | None = None) -> Choice:
    """Choose as `choose` does, for attention with its division: "auto" may then take flash-linear-attention's kernels.

    It does so on a GPU by whose record they are right and faster than ours; see `why_not_faster`.

    Raises: as `choose`.
    """
    device = call.v_BHSV.device
    if call.implementation != "auto" or device.type != "cuda":
        return choose(call, form=form)
    reason = (
        why_not_faster(call, torch.cuda.get_device_name(device), record_of(device))
        or _why_no_fla(call, interpreted_is_fine=False)
        or _unsupported_call(call, any_lengths=False)
        or _unsupported_types(call, FLA_DTYPES)
        or _known_of_fla(call, by_name=False)
    )
    if reason is not None:
        return choose(call, form=form)
    return Choice("fla", "flash-linear-attention was faster on this GPU")


def why_not_faster(call: LinearCall, name: str, record: GpuRecord | None) -> str | None:
    """The reason why flash-linear-attention is not faster for a call on devices `name`, by their record, or None."""
    way = "step" if call.queries == 1 else way_of(_needs_gradients(call))
    gated = "" if call.log_gate_BHS is None else " gated"
    return why_case_not_faster("fla", f"{name_of(call.v_BHSV.dtype)} {way}{gated}", name, record)


def why_case_not_faster(operation: str, case: str, name: str, record: GpuRecord | None) -> str | None:
    """The reason why one of flash-linear-attention's operations is not faster in a case, given by its name, or None."""
    if record is None or case not in cases_of_fla(record):
        return f"flash-linear-attention was not seen to be faster on {name} ({case})"
    return why_not_right(operation, name, record)


def cases_of_fla(record: GpuRecord) -> list[str]:
    """The cases in which flash-linear-attention was ahead of our kernels by more than `FLA_LEAD`.

    Not those of products of float32, which it rounds to TF32 on a GPU.
    """
    return [
        case
        for case, times in record.ratios.items()
        if times.get("ours_ms", 0.0) > FLA_LEAD * times.get("fla_ms", float("inf")) and "float32 forward" not in case
    ]


def check_choice(call: LinearCall, *, sums: torch.dtype = torch.float32) -> None:
    """Refuse a slice of a sequence where `choose` would refuse one with tokens, however many this one has.

    Ranks without tokens so raise with those that have some, which would otherwise be left alone in an exchange.

    Raises: as `choose`.
    """
    if call.implementation not in ("auto", "streaming"):
        choose(call.one_token(), sums=sums)


def check_implementation(implementation: Implementation) -> None:
    """Raise ConfigError for an implementation that does not exist."""
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation {implementation!r} is unknown; use {', '.join(IMPLEMENTATIONS)}")


def resolve(
    implementation: Implementation,
    why_not_triton: Callable[[], str | None],
    trial: Callable[[], str | None] = lambda: None,
    why_not_native: Callable[[], str | None] | None = None,
    why_not_fla: Callable[[], str | None] | None = None,
) -> Choice:
    """Pick the implementation of a call; each callable returns why its kernels cannot take it, or None.

    `trial` is asked by "auto" where Triton's can, on a GPU that is there.

    Raises: as `choose`.
    """
    check_implementation(implementation)
    if implementation == "streaming":
        return Choice("streaming", "asked for by name")
    named = {"native": ("C", why_not_native), "triton": ("Triton", why_not_triton), "fla": ("fla", why_not_fla)}
    if implementation != "auto":
        kind, why_not = named[implementation]
        reason = f"there are no {kind} kernels of this operation" if why_not is None else why_not()
        if reason is not None:
            raise ConfigError(
                f"implementation={implementation!r} was asked for, but {reason}; use 'auto' or 'streaming'"
            )
        return Choice(implementation, "asked for by name")
    target = kernel_target()
    if why_not_native is not None and target is None:
        if (reason := why_not_native()) is None:
            return Choice("native", "the tensors are on a CPU")
        if not reason.startswith(ELSEWHERE):
            return Choice("streaming", reason)
    reason = why_not_triton()
    if reason is None and target is None:
        reason = trial()
    return Choice("triton", "the tensors are on a GPU") if reason is None else Choice("streaming", reason)


def kernels_taken(device: torch.device) -> str:
    """The kernels with which "auto" computes linear attention on this device, in words for a command's first line."""
    if device.type != "cuda":
        reason = why_no_library() if device.type == "cpu" else f"{device.type} has no kernels"
        return "C's" if reason is None else f"torch's operations; {reason}"
    name, record, triton = torch.cuda.get_device_name(device), record_of(device), surroundings_of(device).triton
    reason = why_no_kernels(torch.empty(0, device=device), interpreted_is_fine=False)
    if reason is not None:
        return f"torch's operations; {reason}"
    wrong = why_wrong("linear", device, triton)
    words = f"Triton's {triton}, each where its trial comes out right{'' if wrong is None else f'; {wrong}'}"
    if record is None or find_spec("fla") is None or why_not_right("fla", name, record) is not None:
        return words
    faster = cases_of_fla(record)
    faster = [case for case in faster if not case.startswith("fla_")]
    return f"{words}; flash-linear-attention's for {', '.join(faster)}" if faster else words


def choose_step(call: LinearCall) -> Choice:
    """Choose as `choose_attention` does, for a decode step: our kernel has no backward pass.

    Raises: as `choose`.
    """
    if call.implementation != "fla" and _needs_gradients(call):
        if call.implementation == "triton":
            raise ConfigError(
                "implementation='triton' was asked for, but gradients are needed, and the kernel of a step has none; "
                "use torch.no_grad(), 'auto' or 'streaming'"
            )
        return Choice("streaming", "gradients are needed")
    return choose_attention(call, form="step")


def _needs_gradients(call: LinearCall) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors)


def why_no_kernels(v_BHSV: torch.Tensor, *, interpreted_is_fine: bool) -> str | None:
    """The reason why no kernel at all can take these values, or None; by name also the interpreter will do."""
    interpreted = environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")
    elsewhere = v_BHSV.device.type != "cuda" and kernel_target() is None
    if elsewhere and not (interpreted_is_fine and interpreted):
        return f"the tensors are on {v_BHSV.device.type}: kernels need a GPU, or TRITON_INTERPRET=1 for tests"
    if find_spec("triton") is None:
        return f"triton is not installed; {extra_hint('gpu')}"
    if torch.compiler.is_compiling():
        return "the call is being compiled, and a compiled graph takes the streaming form"
    if v_BHSV.dtype == torch.bfloat16 and v_BHSV.is_cuda and torch.cuda.get_device_capability(v_BHSV.device) < (8, 0):
        return "GPUs older than Ampere have no bfloat16"
    return None


def why_no_fla(v_BHSV: torch.Tensor, *, interpreted_is_fine: bool) -> str | None:
    """The reason why flash-linear-attention cannot take these values at all, or None; by name the interpreter will do.

    It is not asked for where there are no kernels: finding a package takes time.
    """
    reason = why_no_kernels(v_BHSV, interpreted_is_fine=interpreted_is_fine)
    if reason is None and find_spec("fla") is None:
        return f"flash-linear-attention is not installed; {extra_hint('fla')}"
    return reason


def _why_no_fla(call: LinearCall, *, interpreted_is_fine: bool) -> str | None:
    reason = why_no_fla(call.v_BHSV, interpreted_is_fine=interpreted_is_fine)
    if reason is None and not call.causal:
        return "attention is not causal: flash-linear-attention's kernels are"
    return reason


def _known_of_fla(call: LinearCall, *, by_name: bool) -> str | None:
    # A step has no matrix products, so float32 is not rounded there.
    by_name = by_name or call.queries == 1
    gated = call.log_gate_BHS is not None
    asked = Asked("fla_simple_gla", call.v_BHSV.dtype, _needs_gradients(call), gated=gated, by_name=by_name)
    return why_known_not(asked, surroundings_of(call.v_BHSV.device))


def _unsupported_sums(sums: torch.dtype) -> str | None:
    return None if sums == torch.float32 else f"sums in {sums} are asked for: the kernels' are float32"


def _unsupported_call(call: LinearCall, *, any_lengths: bool) -> str | None:
    state = call.state
    if call.prefix:
        return "there is a prefix that attends to itself in full: the kernels take all of a call in one way"
    if call.documents and not call.causal:
        return "attention is not causal and there are several documents: the kernels take one sequence then"
    if call.causal and call.queries != call.keys and not any_lengths:
        return f"there are {call.queries} queries and {call.keys} keys: the causal kernels take as many of both"
    if not call.q_BHLK.numel() or not (call.k_BHSK.numel() or state is not None):
        return "there are no tokens"
    for sums in () if state is None else (state.s_BHMV, state.z_BHM, state.mass_BH):
        if sums.dtype != torch.float32:
            return f"the state is {sums.dtype}: the kernels' sums are float32"
    return None


def why_no_library() -> str | None:
    """The reason why this machine has no C kernels, or None; the first call compiles them."""
    try:
        kernels()
    except NoLibraryError as error:
        return str(error)
    return None


def why_not_for_c(tensors: Iterable[torch.Tensor]) -> str | None:
    """The reason why C kernels cannot read these tensors, or None; their types are the operation's to judge."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"{ELSEWHERE} {tensor.device.type}"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"there is a {type(tensor).__name__}: C kernels take plain tensors"
    if torch.compiler.is_compiling():
        return "the call is being compiled, and a compiled graph takes the streaming form"
    return None


def _unsupported_types(call: LinearCall, dtypes: tuple[torch.dtype, ...]) -> str | None:
    q, k, v = call.qkv
    if not q.dtype == k.dtype == v.dtype or v.dtype not in dtypes:
        words = ", ".join(map(name_of, dtypes))
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: the kernels take one of {words} for all three"
    if any(t.device != v.device for t in (q, k, *call.map_tensors)):
        return "the tensors are on different devices"
    return None


def _unsupported_sizes(call: LinearCall, dtypes: tuple[torch.dtype, ...], largest: int) -> str | None:
    q, v, tensors = call.q_BHLK, call.v_BHSV, call.map_tensors
    if (reason := _unsupported_types(call, dtypes)) is not None:
        return reason
    if call.feature_map is not None and not isinstance(call.feature_map, HasFusedForm):
        return f"the kernels do not know the feature map {type(call.feature_map).__name__}"
    heads, size = q.shape[1], q.shape[3]
    for t in tensors:
        if t.dim() != 3 or (t.shape[0], t.shape[2]) != (heads, size):
            return f"the feature map's tensor is {tuple(t.shape)}: the kernels take [{heads}, projections, {size}] here"
    sizes = (size, v.shape[3], *(t.shape[1] for t in tensors))
    if not 0 < max(sizes) <= largest or not min(sizes):
        return f"head size, values and projections are {sizes}: the kernels take 1 to {largest} of each"
    return None

"""Which implementation computes a call of relative attention, and why: the rules of linear attention's choice."""

import torch

from dist_attn.ops.linear_attention.call import Implementation, one_token
from dist_attn.ops.linear_attention.implementation import DTYPES, Choice, resolve, why_no_kernels
from dist_attn.ops.relative_attention.state import RelativeState

__all__ = ["check_relative_choice", "choose_relative"]


def choose_relative(
    implementation: Implementation,
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    form: str = "windowed",
    state: RelativeState | None = None,
    packed: bool = False,
) -> Choice:
    """Triton's kernels where they are asked for by name, the windowed form ("streaming") otherwise.

    As with linear attention, "auto" takes the kernels for tensors of a GPU once they have run on one.

    Raises: ConfigError for an implementation that does not exist, and for kernels that were asked for by name and
        cannot take this call; the message says why.
    """
    return resolve(
        implementation,
        lambda: (
            why_no_kernels(v_BHSV, interpreted_is_fine=implementation == "triton")
            or _unsupported_call(phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK, form, state, packed)
        ),
    )


def check_relative_choice(
    implementation: Implementation,
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    state: RelativeState | None = None,
) -> None:
    """Refuse a slice of a sequence where `choose_relative` would refuse one with tokens, however many this one has.

    Raises: as `choose_relative`.
    """
    if implementation not in ("auto", "streaming"):
        q, k, v = (one_token(x) for x in (phi_q_BHLK, phi_k_BHSK, v_BHSV))
        choose_relative(implementation, q, k, v, phi_rp_HRK, state=state)


def _unsupported_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rp: torch.Tensor,
    form: str,
    state: RelativeState | None,
    packed: bool,
) -> str | None:
    if packed:
        return "there are several documents: the kernels' windows are those of one sequence"
    if form != "windowed":
        return f"the form {form!r} was asked for too: kernels are of the windowed one"
    if not (q.shape[0] * q.shape[1] * q.shape[2] and k.shape[2]):
        return "there are no tokens"
    if state is not None and state.sz_BHMW.dtype != torch.float32:
        return f"the state is {state.sz_BHMW.dtype}: the kernels' sums are float32"
    if any(t.dtype not in DTYPES for t in (q, k, v, rp)):
        types = f"{q.dtype}, {k.dtype}, {v.dtype} and {rp.dtype}"
        return f"phi_q, phi_k, v and phi_rp are {types}: the kernels take float32, bfloat16 and float16"
    if not (q.shape[3] and v.shape[3]):
        return f"features and values are {q.shape[3]} and {v.shape[3]}: the kernels take 1 or more of each"
    if any(t.device != v.device for t in (q, k, rp)):
        return "the tensors are on different devices"
    return None

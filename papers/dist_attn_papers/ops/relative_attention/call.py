"""A call of relative attention as one value, and which implementation computes it, by the rules of linear attention.

Shape letters: B batch, H heads, L queries, S keys, K features, V values, W = V + 1 (v and a ones column), R = 2 k + 1
rows of relative positions, T = k - 1 tokens of a window.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.documents import check_documents
from dist_attn.ops.linear_attention.call import one_token
from dist_attn.ops.linear_attention.implementation import DTYPES, Choice, resolve, why_no_kernels, why_not_by_default
from dist_attn.ops.sequence_call import SequenceCall
from dist_attn.ops.trial import Attempt
from dist_attn_papers.ops.relative_attention.state import RelativeState
from dist_attn_papers.ops.relative_attention.trial import RelativeForm, RelativeKind, compared

Form = Literal["windowed", "naive"]


class WideInputs(NamedTuple):
    """The inputs in the precision of the sums, v with a column of ones."""

    q_BHLK: torch.Tensor
    k_BHSK: torch.Tensor
    v1_BHSW: torch.Tensor
    rp_HRK: torch.Tensor


@dataclass(frozen=True)
class RelativeCall(SequenceCall[torch.Tensor]):
    """The arguments of `relative_attention`, which explains them, and of its packed and streaming forms."""

    phi_q_BHLK: torch.Tensor
    phi_k_BHSK: torch.Tensor
    v_BHSV: torch.Tensor
    phi_rp_HRK: torch.Tensor
    causal: bool = True
    form: Form = "windowed"
    state: RelativeState | None = None

    operation: ClassVar[str] = "relative_attention"
    along: ClassVar[tuple[str, ...]] = ("phi_q_BHLK",)
    along_memory: ClassVar[tuple[str, ...]] = ("phi_k_BHSK", "v_BHSV")
    dim: ClassVar[int] = 2

    @property
    def queries(self) -> int:
        """L."""
        return self.phi_q_BHLK.shape[2]

    @property
    def keys(self) -> int:
        """S."""
        return self.phi_k_BHSK.shape[2]

    @property
    def reach(self) -> int:
        """k: the distance from which on all are alike."""
        return self.phi_rp_HRK.shape[1] // 2

    @property
    def width(self) -> int:
        """T: the tokens of a window."""
        return max(self.reach - 1, 0)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values and positions."""
        return self.phi_q_BHLK, self.phi_k_BHSK, self.v_BHSV, self.phi_rp_HRK

    def with_qkv(self, phi_q_BHLK: torch.Tensor, phi_k_BHSK: torch.Tensor, v_BHSV: torch.Tensor) -> "RelativeCall":
        """Return this call with other queries, keys and values."""
        return replace(self, phi_q_BHLK=phi_q_BHLK, phi_k_BHSK=phi_k_BHSK, v_BHSV=v_BHSV)

    def widened(self) -> WideInputs:
        """The inputs in the precision of the sums: float32, or that of the values or the state if it is more."""
        dtype = torch.promote_types(self.v_BHSV.dtype, torch.float32 if self.state is None else self.state.dtype)
        q, k, v, rp = (t.to(dtype) for t in self.tensors)
        return WideInputs(q, k, F.pad(v, (0, 1), value=1.0), rp)

    def check(self) -> None:
        """Raises: ShapeError for tensors, documents or a state that do not fit together; InputError for a form that
        does not exist."""
        q, k, v, rp = self.tensors
        shapes = f"phi_q {tuple(q.shape)}, phi_k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not (q.dim() == k.dim() == v.dim() == 4 and rp.dim() == 3):
            raise ShapeError(
                f"{shapes}, phi_rp {tuple(rp.shape)}: needed are [B, H, L, K], [B, H, S, K], [B, H, S, V] and [H, R, K]"
            )
        if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            raise ShapeError(f"{shapes}: batch, heads and size must be equal, the length equal in phi_k and v")
        if rp.shape[0] != q.shape[1] or rp.shape[2] != q.shape[3] or rp.shape[1] % 2 == 0:
            raise ShapeError(
                f"phi_rp has shape {tuple(rp.shape)}; needed is [{q.shape[1]}, R, {q.shape[3]}] with R = 2 k + 1 odd"
            )
        if self.form not in ("windowed", "naive"):
            raise InputError(f"form {self.form!r} of relative attention was given; there are 'windowed' and 'naive'")
        if self.documents:
            check_documents(self.documents, self.queries, self.keys)
        if self.state is not None:
            batch, heads, _, features = k.shape
            self.state.check(batch, heads, features, v.shape[3], self.width)


@dataclass(frozen=True)
class RelativeStreamCall(SequenceCall[tuple[torch.Tensor, RelativeState]]):
    """The arguments of `relative_attention_streaming`, which explains them."""

    phi_q_BHLK: torch.Tensor
    phi_k_BHLK: torch.Tensor
    v_BHLV: torch.Tensor
    phi_rp_HRK: torch.Tensor
    state: RelativeState | None = None

    operation: ClassVar[str] = "relative_attention_streaming"
    along: ClassVar[tuple[str, ...]] = ("phi_q_BHLK", "phi_k_BHLK", "v_BHLV")
    dim: ClassVar[int] = 2

    @property
    def call(self) -> RelativeCall:
        """The causal call that goes on from the state."""
        return RelativeCall(
            *(self.phi_q_BHLK, self.phi_k_BHLK, self.v_BHLV, self.phi_rp_HRK),
            state=self.state,
            implementation=self.implementation,
        )

    packs: ClassVar[bool] = False


def choose_relative(call: RelativeCall, *, form: RelativeForm | None = None) -> Choice:
    """Triton's kernels where they are asked for by name, the windowed form ("streaming") otherwise.

    As with linear attention, "auto" takes the kernels on a GPU where their trial, which this begins, comes out right.
    `form` is "stream" where a state goes on.

    Raises: ConfigError for an implementation that does not exist, and for kernels that were asked for by name and
        cannot take this call; the message says why.
    """
    by_name = call.implementation == "triton"
    return resolve(
        call.implementation,
        lambda: why_no_kernels(call.v_BHSV, interpreted_is_fine=by_name) or _unsupported_call(call),
        lambda: _tried(call, form),
    )


def attempt_relative(call: RelativeCall, form: RelativeForm | None = None) -> Attempt:
    """The trial that "auto" begins on a GPU for calls of this one's kind, however few tokens there are."""
    like = call.with_qkv(*(one_token(x) for x in call.tensors[:3]))
    return Attempt(
        _kind_of(call, form),
        lambda: why_no_kernels(call.v_BHSV, interpreted_is_fine=False) or _unsupported_call(like) or _tried(call, form),
    )


def _kind_of(call: RelativeCall, form: RelativeForm | None) -> RelativeKind:
    return RelativeKind.of(call, form or ("causal" if call.causal else "full"))


def _tried(call: RelativeCall, form: RelativeForm | None) -> str | None:
    kind = _kind_of(call, form)
    return why_not_by_default("relative", kind, partial(compared, kind))


def check_relative_choice(call: RelativeCall) -> None:
    """Refuse a slice of a sequence where `choose_relative` would refuse one with tokens, however many this one has.

    Raises: as `choose_relative`.
    """
    if call.implementation not in ("auto", "streaming"):
        q, k, v = (one_token(x) for x in call.tensors[:3])
        choose_relative(call.with_qkv(q, k, v))


def _unsupported_call(call: RelativeCall) -> str | None:
    q, k, v, rp = call.tensors
    if call.documents:
        return "there are several documents: the kernels' windows are those of one sequence"
    if call.form != "windowed":
        return f"the form {call.form!r} was asked for too: kernels are of the windowed one"
    if not (q.shape[0] * q.shape[1] * q.shape[2] and k.shape[2]):
        return "there are no tokens"
    if call.state is not None and call.state.dtype != torch.float32:
        return f"the state is {call.state.dtype}: the kernels' sums are float32"
    if any(t.dtype not in DTYPES for t in call.tensors):
        types = f"{q.dtype}, {k.dtype}, {v.dtype} and {rp.dtype}"
        return f"phi_q, phi_k, v and phi_rp are {types}: the kernels take float32, bfloat16 and float16"
    if not (q.shape[3] and v.shape[3]):
        return f"features and values are {q.shape[3]} and {v.shape[3]}: the kernels take 1 or more of each"
    if any(t.device != v.device for t in (q, k, rp)):
        return "the tensors are on different devices"
    return None

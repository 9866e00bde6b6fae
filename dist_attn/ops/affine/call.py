"""A call of an affine recurrence as one value: its tensors, what is asked of them, and parts of it.

Shape letters: B batch, H heads, L tokens, K key size, V values, G decays of a head: 1, or K.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar, Generic, Literal, NamedTuple

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.affine.state import AffineState
from dist_attn.ops.documents import check_documents
from dist_attn.ops.kernel_operation import Each, present
from dist_attn.ops.parts import Place
from dist_attn.ops.sequence_call import SequenceCall

Read = Literal["after", "before"]


class Inputs(NamedTuple, Generic[Each]):
    """A value for each tensor of a recurrence: the tensor, its gradient, or whether that is asked for.

    `s` is S before the first token. Without q tokens are absorbed.
    """

    q: Each
    k: Each
    v: Each
    log_decay: Each
    a: Each
    b: Each
    beta: Each
    bonus: Each
    s: Each


AffineTensors = Inputs[torch.Tensor | None]


class AffineBuffers(NamedTuple):
    """The memory that an implementation may write to: outputs, and in its backward pass gradients."""

    out: torch.Tensor | None
    grads: Inputs[Place | None]


@dataclass(frozen=True)
class AffineCall(SequenceCall[tuple[torch.Tensor, AffineState]]):
    """The arguments of `affine_recurrence`, or with `beta_BHL` of `gated_delta_rule`; these explain them.

    `products` is the type to which kernels that take one type round what they multiply, see `products_dtype`. `buffers`
    is memory that outputs and gradients may be written to, or not; see `ops.parts`.
    """

    q_BHLK: torch.Tensor
    k_BHLK: torch.Tensor
    v_BHLV: torch.Tensor
    log_decay_BHLG: torch.Tensor
    erase: tuple[torch.Tensor, torch.Tensor] | None = None
    beta_BHL: torch.Tensor | None = None
    bonus_HK: torch.Tensor | None = None
    read: Read = "after"
    state: AffineState | None = None
    products: torch.dtype | None = None
    buffers: AffineBuffers | None = None

    operation: ClassVar[str] = "affine_recurrence"
    along: ClassVar[tuple[str, ...]] = ("q_BHLK", "k_BHLK", "v_BHLV", "log_decay_BHLG", "erase", "beta_BHL")
    deterministic: ClassVar[bool] = True
    dim: ClassVar[int] = 2

    @staticmethod
    def of(x: AffineTensors, read: Read, documents: tuple[int, ...]) -> "AffineCall":
        """The call whose `inputs` these are; where there are no queries, with the keys in their place."""
        k, erase = present(x.k), None if x.a is None or x.b is None else (x.a, x.b)
        q, state = k if x.q is None else x.q, None if x.s is None else AffineState(x.s)
        return AffineCall(
            q, k, present(x.v), present(x.log_decay), erase, x.beta, x.bonus, read, state, documents=documents
        )

    @property
    def tokens(self) -> int:
        """L."""
        return self.q_BHLK.shape[2]

    @property
    def sequence(self) -> tuple[torch.Tensor | None, ...]:
        """q, k, v, log decay, a, b and beta: what lies along the tokens."""
        a_b = (None, None) if self.erase is None else self.erase
        return self.q_BHLK, self.k_BHLK, self.v_BHLV, self.log_decay_BHLG, *a_b, self.beta_BHL

    @property
    def erases(self) -> bool:
        """Return whether tokens take something from the state, so that its transition is a matrix."""
        return self.erase is not None or self.beta_BHL is not None

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[B, H, K, V]."""
        batch, heads, _, size = self.k_BHLK.shape
        return batch, heads, size, self.v_BHLV.shape[3]

    def inputs(self, first_BHKV: torch.Tensor | None) -> AffineTensors:
        """All tensors of the call, with this S before its first token, as kernels differentiate them."""
        q, k, v, log_decay, a, b, beta = self.sequence
        return Inputs(q, k, v, log_decay, a, b, beta, self.bonus_HK, first_BHKV)

    def with_sequence(self, sequence: tuple[torch.Tensor | None, ...]) -> "AffineCall":
        """Return this call with other tensors along the tokens, in the order of `sequence`."""
        q, k, v, log_decay, a, b, beta = sequence
        assert q is not None and k is not None and v is not None and log_decay is not None
        erase = None if a is None or b is None else (a, b)
        return replace(self, q_BHLK=q, k_BHLK=k, v_BHLV=v, log_decay_BHLG=log_decay, erase=erase, beta_BHL=beta)

    def part(self, start: int, stop: int) -> "AffineCall":
        """The call of the tokens from `start` to before `stop`, with documents that start among these, no buffers."""
        sequence = tuple(None if t is None else t[:, :, start:stop] for t in self.sequence)
        documents = tuple(at - start for at in self.documents if start <= at < stop)
        return replace(self.with_sequence(sequence), documents=documents, buffers=None)

    def sums_dtype(self) -> torch.dtype:
        """The precision of the state: the widest of all inputs, float32 at least."""
        states = () if self.state is None else (self.state.s_BHKV,)
        there = (t for t in (*self.sequence, *states) if t is not None)
        return reduce(torch.promote_types, (t.dtype for t in there), torch.float32)

    def products_dtype(self) -> torch.dtype:
        """The type of autocast where that is on, else that of the values, beside which models make keys in float32."""
        kind = self.v_BHLV.device.type
        if self.products is not None:
            return self.products
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return self.v_BHLV.dtype

    @property
    def needs_gradients(self) -> bool:
        """Return whether autograd is to differentiate it."""
        state = None if self.state is None else self.state.s_BHKV
        tensors = (*self.sequence, self.bonus_HK, state)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def first_sums(self, dtype: torch.dtype) -> torch.Tensor:
        """S before the first token, [B, H, K, V]."""
        if self.state is None:
            return torch.zeros(self.state_shape, dtype=dtype, device=self.v_BHLV.device)
        return self.state.s_BHKV.to(dtype)

    def check(self) -> None:
        """Raise ShapeError for tensors that do not fit together, InputError for settings that mean nothing."""
        q, k, v, decay = self.q_BHLK, self.k_BHLK, self.v_BHLV, self.log_decay_BHLG
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, log_decay {tuple(decay.shape)}"
        if not (q.dim() == k.dim() == v.dim() == decay.dim() == 4):
            raise ShapeError(f"{shapes}: all need four dimensions [batch, heads, tokens, size]")
        if q.shape != k.shape or not k.shape[:3] == v.shape[:3] == decay.shape[:3]:
            raise ShapeError(f"{shapes}: q and k need equal shapes, all four the same batch, heads and tokens")
        if decay.shape[3] not in (1, k.shape[3]):
            raise ShapeError(f"log_decay has {decay.shape[3]} numbers for a head; needed are 1 or {k.shape[3]}")
        for name, t, needed in zip(
            ("erase[0]", "erase[1]", "beta"), self.sequence[4:], (k.shape, k.shape, k.shape[:3]), strict=True
        ):
            if t is not None and t.shape != needed:
                raise ShapeError(f"{name} has shape {tuple(t.shape)}; needed is {tuple(needed)}")
        if self.bonus_HK is not None and self.bonus_HK.shape != (k.shape[1], k.shape[3]):
            raise ShapeError(f"bonus has shape {tuple(self.bonus_HK.shape)}; needed is {(k.shape[1], k.shape[3])}")
        check_read(self.read, self.bonus_HK)
        if self.state is not None and tuple(self.state.s_BHKV.shape) != self.state_shape:
            raise ShapeError(f"the state is {tuple(self.state.s_BHKV.shape)}; these inputs need {self.state_shape}")
        check_documents(self.documents, self.tokens)


def check_read(read: Read, bonus_HK: torch.Tensor | None) -> None:
    """Raise InputError for another `read` than there is, and for a bonus where a query sees its token already."""
    if read not in ("after", "before"):
        raise InputError(f"read is {read!r}; needed is 'after' or 'before'")
    if bonus_HK is not None and read == "after":
        raise InputError("a bonus was given with read='after', which sees the token already; give read='before'")

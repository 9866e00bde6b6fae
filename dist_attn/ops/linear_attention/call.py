"""A call of linear attention as one value: its tensors, what is asked of them, and parts of it along the tokens.

Shape letters: B batch, H heads, L queries, S keys, K head size, V values, M features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar, NamedTuple

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import check_documents
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.parts import Place
from dist_attn.ops.sequence_call import SequenceCall
from dist_attn.ops.state import LinearState

DEFAULT_DENOMINATOR = Denominator()


class OutputBuffers(NamedTuple):
    """The memory that an implementation may write to: outputs, and in its backward pass the gradients of q, k and v."""

    out: torch.Tensor | None
    grad_q: Place | None = None
    grad_k: Place | None = None
    grad_v: Place | None = None


@dataclass(frozen=True)
class LinearCall(SequenceCall[tuple[torch.Tensor, LinearState]]):
    """The arguments of `linear_attention`, which explains them.

    `buffers` is memory that outputs and gradients may be written to, or not; see `SplitSequence`.
    """

    q_BHLK: torch.Tensor
    k_BHSK: torch.Tensor
    v_BHSV: torch.Tensor
    log_gate_BHS: torch.Tensor | None = None
    key_scale_BHS: torch.Tensor | None = None
    feature_map: FeatureMap | None = None
    causal: bool = True
    state: LinearState | None = None
    denominator: Denominator = DEFAULT_DENOMINATOR
    prefix: int = 0
    buffers: OutputBuffers | None = None

    operation: ClassVar[str] = "linear_attention"
    along: ClassVar[tuple[str, ...]] = ("q_BHLK",)
    along_memory: ClassVar[tuple[str, ...]] = ("k_BHSK", "v_BHSV", "log_gate_BHS", "key_scale_BHS")
    deterministic: ClassVar[bool] = True
    dim: ClassVar[int] = 2

    @property
    def queries(self) -> int:
        """L."""
        return self.q_BHLK.shape[2]

    @property
    def keys(self) -> int:
        """S."""
        return self.k_BHSK.shape[2]

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.q_BHLK, self.k_BHSK, self.v_BHSV

    @property
    def sequence(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q, k, v, log gate and key scale: what lies along the tokens."""
        return self.q_BHLK, self.k_BHSK, self.v_BHSV, self.log_gate_BHS, self.key_scale_BHS

    def with_sequence(
        self,
        q_BHLK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        log_gate_BHS: torch.Tensor | None = None,
        key_scale_BHS: torch.Tensor | None = None,
    ) -> "LinearCall":
        """Return this call with other tensors along the tokens."""
        return replace(
            self, q_BHLK=q_BHLK, k_BHSK=k_BHSK, v_BHSV=v_BHSV, log_gate_BHS=log_gate_BHS, key_scale_BHS=key_scale_BHS
        )

    @property
    def map_tensors(self) -> tuple[torch.Tensor, ...]:
        """The feature map's parameters."""
        return () if self.feature_map is None else self.feature_map.tensors()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are there: along the tokens, of the feature map, of the state."""
        state = () if self.state is None else self.state.tensors()
        return [t for t in (*self.sequence, *self.map_tensors, *state) if t is not None]

    @property
    def map_tensor(self) -> torch.Tensor | None:
        """The only one of these, of maps that kernels know."""
        return next(iter(self.map_tensors), None)

    def features(self, x_BHLK: torch.Tensor) -> torch.Tensor:
        """phi(x) [B, H, L, M]; x itself without a feature map."""
        return x_BHLK if self.feature_map is None else self.feature_map(x_BHLK)

    def tokens(self, start: int, stop: int | None = None) -> "LinearCall":
        """The call of queries and keys from `start` to before `stop`."""
        return self.part(slice(start, stop), slice(start, stop))

    def part(self, queries: slice, keys: slice) -> "LinearCall":
        """The call of some queries over some keys, with the documents that start among these; no prefix, no buffers."""
        first, last, _ = keys.indices(self.keys)
        gate, scale = (None if x is None else x[:, :, keys] for x in (self.log_gate_BHS, self.key_scale_BHS))
        sequence = self.q_BHLK[:, :, queries], self.k_BHSK[:, :, keys], self.v_BHSV[:, :, keys], gate, scale
        documents = tuple(at - first for at in self.documents if first <= at < last)
        return replace(self.with_sequence(*sequence), documents=documents, prefix=0, buffers=None)

    def heads(self, some: slice) -> "LinearCall":
        """The call of some heads, with a feature map that kernels know; no state, no buffers."""
        q, k, v = (x[:, some] for x in self.qkv)
        gate, scale = (None if x is None else x[:, some] for x in (self.log_gate_BHS, self.key_scale_BHS))
        feature_map = self.feature_map
        if feature_map is not None:
            feature_map = feature_map.with_tensors(*(t[some] for t in feature_map.tensors()))
        call = self.with_sequence(q, k, v, gate, scale)
        return replace(call, feature_map=feature_map, state=None, buffers=None)

    def reading(self, state: LinearState) -> "LinearCall":
        """The call of the same queries over no keys: all of them read `state`."""
        return replace(self.part(slice(None), slice(0)), causal=False, state=state, documents=())

    def of_keys(self) -> "LinearCall":
        """The call whose queries are its keys: what is chosen by where there are no outputs."""
        return replace(self, q_BHLK=self.k_BHSK, causal=True, buffers=None)

    def one_token(self) -> "LinearCall":
        """A call of one token with the same types, sizes and device, without values, for a slice of any length."""
        q, k, v = map(one_token, self.qkv)
        return self.with_sequence(q, k, v)

    def contiguous(self) -> "LinearCall":
        """Return this call with contiguous tensors: products of strided views may round in another way."""
        q, k, v = (x.contiguous() for x in self.qkv)
        gate, scale = (None if x is None else x.contiguous() for x in (self.log_gate_BHS, self.key_scale_BHS))
        return self.with_sequence(q, k, v, gate, scale)

    def streaming_if_empty(self) -> "LinearCall":
        """Return this call, by the streaming form if it has no queries: kernels take no empty slice.

        For calls that are checked already, so that a rank without tokens is not refused for that.
        """
        return self if self.queries else replace(self, implementation="streaming")

    def num_features(self) -> int:
        """M, whatever the feature map is."""
        with torch.no_grad():
            return self.features(self.k_BHSK[:1, :, :0]).shape[-1]

    def state_before(self, features: int, dtype: torch.dtype = torch.float32) -> LinearState:
        """The call's state, or that of no tokens, of so many features.

        Raises: ShapeError for a state of other sizes.
        """
        v = self.v_BHSV
        sizes = (*v.shape[:2], features, v.shape[3])
        if self.state is None:
            return LinearState.identity(*sizes, dtype=dtype, device=v.device)
        self.state.check(*sizes)
        return self.state

    def sums_dtype(self, at_least: torch.dtype = torch.float32) -> torch.dtype:
        """The precision of sums over the inputs: the widest of all, float32 at least."""
        return state_dtype(self.q_BHLK, self.k_BHSK, self.v_BHSV, state=self.state, at_least=at_least)

    def check(self) -> None:
        """Raise ShapeError for tensors that do not fit together; InputError for a prefix that means nothing."""
        q, k, v = self.q_BHLK, self.k_BHSK, self.v_BHSV
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not (q.dim() == k.dim() == v.dim() == 4):
            raise ShapeError(f"{shapes}: all three need four dimensions [batch, heads, length, size]")
        if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
            raise ShapeError(f"{shapes}: batch and heads must be equal in all three, the length equal in k and v")
        if q.shape[3] != k.shape[3]:
            raise ShapeError(f"q has size {q.shape[3]} per head and k {k.shape[3]}; they must be equal")
        for name, tensor in (("log_gate", self.log_gate_BHS), ("key_scale", self.key_scale_BHS)):
            if tensor is not None and tensor.shape != k.shape[:3]:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}; needed is [batch, heads, keys] = {tuple(k.shape[:3])}"
                )
        check_prefix(self.prefix, causal=self.causal, documents=bool(self.documents))
        if self.documents:
            check_documents(self.documents, self.queries, self.keys)


# Linear attention of calls in whatever way, with the state after the last key.
Attend = Callable[[LinearCall], tuple[torch.Tensor, LinearState]]


def prefix_then_causal(attend: Attend, call: LinearCall, queries: int, keys: int) -> tuple[torch.Tensor, LinearState]:
    """The first `queries` queries read the state after the first `keys` keys, the others go on causally from there."""
    first, state = attend(replace(call.part(slice(queries), slice(keys)), causal=False))
    rest, state = attend(replace(call.part(slice(queries, None), slice(keys, None)), state=state))
    return torch.cat([first, rest], dim=2), state


def check_prefix(prefix: int, *, causal: bool, documents: bool) -> None:
    """Raise InputError for a prefix that means nothing: below 0, of full attention, or of packed documents."""
    if prefix < 0 or (prefix and (not causal or documents)):
        raise InputError(
            f"a prefix of {prefix} tokens was given with causal={causal} and documents={documents}; "
            "a prefix is 0 or more tokens of one causal sequence"
        )


def one_token(x_BHLK: torch.Tensor) -> torch.Tensor:
    """One token of the type, sizes and device of x, without values."""
    return x_BHLK.new_empty(1).expand(*x_BHLK.shape[:2], 1, x_BHLK.shape[3])


def state_dtype(*inputs: torch.Tensor, state: LinearState | None, at_least: torch.dtype = torch.float32) -> torch.dtype:
    """The precision of sums over these inputs and from this state: the widest of all, float32 at least."""
    states = () if state is None else (state.s_BHMV,)
    return reduce(torch.promote_types, (t.dtype for t in (*inputs, *states)), at_least)

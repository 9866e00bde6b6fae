"""One forward pass of an adapted model: what its operations along the sequence compute with, and their states.

transformers' modules call the functions that mix along the sequence without a word about ranks. What these need is
found through a context variable, so that several models, and several passes of one, may run in one process. A state
belongs to the operation that is called in its place: the order of calls is the same in every pass of a model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch

from dist_attn.errors import InputError
from dist_attn.mixers import MixerState
from dist_attn.mixers.base import FieldsState
from dist_attn.mixers.softmax import SoftmaxRows, SoftmaxSlots, SoftmaxState
from dist_attn.ops import KeyValueCache, SequenceOps
from dist_attn.ops.softmax_attention import CacheRows, CacheSlots

Args = ParamSpec("Args")
Result = TypeVar("Result")

_CURRENT: ContextVar["Pass | None"] = ContextVar("pass_of_an_adapted_model", default=None)
_TRACED: list["Pass"] = []
"""The same while torch.compile looks on, which knows no context variables; nothing else runs meanwhile."""


@dataclass(frozen=True)
class OperationState(FieldsState):
    """The state of one operation: the last inputs of a convolution, or the sums of a recurrence."""

    x: torch.Tensor


@dataclass
class Pass:
    """A pass over `length` tokens of this process; `before` is None in the pass that finds out what states there are.

    Where this process has no tokens the modules see one that nobody asked for, since they cannot take none: operations
    leave it out (`own`), and what it becomes is thrown away (`filled`).
    """

    ops: SequenceOps
    length: int
    before: tuple[MixerState, ...] | None = None
    after: list[MixerState] = field(default_factory=list)
    rounded: dict[int, torch.dtype] = field(default_factory=dict)  # of some of these, by number
    read: torch.Tensor | None = None  # hidden states [1, L, D] that only the read-out is to be made of
    step: bool = False  # of decoding, one token of each sequence
    reader: Callable[[int, torch.Tensor], torch.Tensor] | None = None  # in the place of a layer, by its number

    def tensor_before(self) -> torch.Tensor | None:
        """The state of the operation that is called now."""
        if self.before is None:
            return None
        state = self._state()
        assert isinstance(state, OperationState)
        return state.x

    def cache_before(self, k_BGLK: torch.Tensor, v_BGLV: torch.Tensor) -> KeyValueCache | CacheRows | CacheSlots:
        """The keys and values so far of the attention that is called now with these; in decode steps perhaps by row."""
        if self.before is None:
            return KeyValueCache(k_BGLK[:, :, :0], v_BGLV[:, :, :0])
        state = self._state()
        if self.step and isinstance(state, SoftmaxRows):
            return state.caches
        if self.step and isinstance(state, SoftmaxSlots):
            return state.slots
        assert isinstance(state, SoftmaxState)
        return state.cache

    def keep(self, after: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """The state that the operation leaves behind; every operation calls this once, or `keep_cache`.

        It is rounded to `dtype` with all others: its numbers may not be there yet.
        """
        if dtype is not None:
            self.rounded[len(self.after)] = dtype
        self.after.append(OperationState(after))

    def keep_cache(self, after: KeyValueCache | CacheRows | CacheSlots, window: int | None) -> None:
        """`keep` of an attention with this window."""
        if isinstance(after, tuple):
            self.after.append(replace(cast(SoftmaxRows, self._state()), caches=after))
            return
        if isinstance(after, CacheSlots):
            self.after.append(replace(cast(SoftmaxSlots, self._state()), slots=after))
            return
        no_tail = after.k_BGSK.new_zeros((after.k_BGSK.shape[0], 0, 0))
        self.after.append(SoftmaxState(after, no_tail, window))

    def states_after(self) -> tuple[MixerState, ...]:
        """The states that the operations of the whole pass left behind.

        Raises: InputError where fewer were called than the state before is of, as in a step compiled piece by piece.
        """
        if self.before is not None and len(self.after) != len(self.before):
            raise InputError(
                f"the model called {len(self.after)} operations along the sequence and its state is of "
                f"{len(self.before)}; compile a step with fullgraph=True, or not at all"
            )
        for number, dtype in self.rounded.items():
            self.after[number] = self.after[number].replace(tuple(t.to(dtype) for t in self.after[number].tensors()))
        return tuple(self.after)

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The tokens of this process alone, which lie along `dim`."""
        return x.narrow(dim, 0, self.length)

    def filled(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """With a row of zeros in the place of the token that nobody asked for."""
        if self.length:
            return x
        shape = list(x.shape)
        shape[dim] = 1
        return torch.cat([x, x.new_zeros(shape)], dim)

    def _state(self) -> MixerState:
        assert self.before is not None
        if len(self.after) >= len(self.before):
            raise InputError(
                f"the model called more than the {len(self.before)} operations along the sequence that its state is of"
            )
        return self.before[len(self.after)]


def current_pass() -> Pass | None:
    """The pass that runs in this context."""
    if torch.compiler.is_dynamo_compiling():
        return _TRACED[-1] if _TRACED else None
    return _CURRENT.get()


@contextmanager
def running(one: Pass) -> Iterator[None]:
    """Let operations of this context belong to `one`."""
    if torch.compiler.is_dynamo_compiling():
        _TRACED.append(one)
        try:
            yield
        finally:
            _TRACED.pop()
        return
    token = _CURRENT.set(one)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def either(ours: Callable[Concatenate[Pass, Args], Result], theirs: Callable[Args, Result]) -> Callable[Args, Result]:
    """Ours in a pass, theirs outside of one."""

    def chosen(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        one = current_pass()
        return theirs(*args, **kwargs) if one is None else ours(one, *args, **kwargs)

    # A graph that is not of a whole pass would keep for ever that there was none: it breaks here.
    apart = torch.compiler.disable(chosen, reason="operations along the sequence ask which pass runs")

    @wraps(theirs)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        part: bool = torch.compiler.is_dynamo_compiling() and not _TRACED
        return apart(*args, **kwargs) if part else chosen(*args, **kwargs)

    call.bound_by_dist_attn = True  # type: ignore[attr-defined]
    return call

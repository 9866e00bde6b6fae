"""`SequenceOps` over a sequence that is cut across ranks: the other side of the seam that models see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import SequenceOps
from dist_attn.ops.documents import DocumentPlaces
from dist_attn.ops.sequence_call import Implementation, Result, SequenceCall
from dist_attn.sharded.in_turn import threads_of
from dist_attn.sharded.prefix_scan import Algorithm, ScanExchange, settle
from dist_attn.sharded.sharding import CacheKept, Sharding, SoftmaxExchange


class ShardedSequenceOps(SequenceOps):
    """The operations of `LocalSequenceOps` on this rank's slice of a sequence laid out by `layout`.

    State in is the state before the first global token, equal on all ranks; state out the global final one, on all
    ranks. Gradients of replicated inputs are this rank's share; the loss is the sum of the ranks' losses; every rank
    runs every operation and its backward pass, empty slices too.

    With `memory_layout` keys and values of attention lie on a layout of their own, as in cross attention; causal linear
    attention then brings queries to its keys. A `prefix` counts global tokens, and takes linear attention a second
    exchange of states.

    `softmax` says how exact attention gets to all keys: by moving heads to ranks, which is even work and two exchanges
    ("reshuffle"), or by passing keys round, which holds two slices at most and takes P - 1 exchanges ("ring").

    `exchange` is how carries travel, by name or with its details; all ways give the same result to rounding.
    `cache` says what a key-value cache holds after a block: each rank the keys of its own slices ("spread"), which is
    the one state that is not equal on all ranks, or every rank all of them ("whole"), so that each can decode alone.

    `deterministic` makes linear attention, affine recurrences and short convolutions give the same bits for any number
    of ranks; every cut must lie at a multiple of 64 tokens or at the end, and other mixing operations are refused.

    `implementation` is what computes linear attention, affine recurrences and the stream of relative attention on this
    rank, as for `LocalSequenceOps`. Kernels by name are refused where there are none, on ranks without tokens too.

    Every rank must construct it: ranks compare layouts and exchanges, in one small exchange unless they are those of
    the object constructed before; the first time they also learn each other's hosts and the measured times.

    Raises: ShapeError for a layout of another number of ranks, or a slice of another length than the layout says;
        MismatchError on every rank where the layouts or the exchanges differ, and from an operation whose arguments
        do: dtypes, sizes, gates, settings. That takes a small exchange the first time a call is met. ConfigError on
        every rank for an implementation that does not exist, or that cannot take a call.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: SequenceLayout,
        memory_layout: SequenceLayout | None = None,
        *,
        softmax: SoftmaxExchange = "reshuffle",
        exchange: ScanExchange | Algorithm = "auto",
        cache: CacheKept = "spread",
        deterministic: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        memory = layout if memory_layout is None else memory_layout
        asked = ScanExchange(exchange) if isinstance(exchange, str) else exchange
        sharding = Sharding(comm, layout, memory, asked, softmax, cache, deterministic, implementation)
        sharding.check_implementation()
        # Messages have one size for any layout: with different ones on the ranks results would be wrong without a word.
        comm.agree_on("layout and exchange", sharding.words)
        self._sharding = replace(sharding, exchange=settle(comm, asked), threads=threads_of(comm))
        self._comm, self._layout = comm, layout

    def run(self, call: SequenceCall[Result]) -> Result:
        """See `SequenceOps.run`."""
        return self._sharding.run(call)

    @contextmanager
    def deferred_states(self) -> Iterator[None]:
        """See `SequenceOps.deferred_states`."""
        if torch.compiler.is_compiling():  # where nothing is deferred
            yield
            return
        own, late = self._sharding, list[Callable[[], None]]()
        self._sharding = replace(own, late=late)
        try:
            yield
            while late:
                late.pop(0)()
        finally:
            self._sharding = own

    def document_places(self, length: int) -> DocumentPlaces:
        """The places of the `length` tokens held here in their documents; an unbroken sequence is one."""
        self._sharding.check_tokens("this call", length)
        return self._sharding.document_places()

    def positions(self, length: int | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Global index of each token held here, [L], counted from the start of this call's sequence."""
        if length is not None:
            self._sharding.check_tokens("this call", length)
        return torch.arange(*self._layout.range(self._comm.rank), device=device)

    def total_length(self, length: int) -> int:
        """Tokens of the whole sequence, of which `length` are held here."""
        self._sharding.check_tokens("this call", length)
        return self._layout.total

    @property
    def cuts(self) -> tuple[int, ...]:
        """The positions at which the sequence is cut between processes; the same answer on every rank."""
        return self._layout.cuts[1:-1]

    @property
    def whole(self) -> bool:
        """Return whether all tokens are held here, whatever the layout; the same answer on every rank."""
        return self._comm.size == 1

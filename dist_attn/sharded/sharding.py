"""The cut of one `ShardedSequenceOps`'s calls over ranks, what these must have in common, and what is refused.

A rank that leaves out a gate, takes another denominator or another scale sends messages of the size that the others
expect: without the comparison the result is wrong without an error. Between processes a message of another size or
dtype ends the process of the rank that receives it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import torch

from dist_attn import __version__
from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError, InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import FeatureMap
from dist_attn.ops.documents import DocumentPlaces, document_places
from dist_attn.ops.linear_attention import check_implementation
from dist_attn.ops.linear_attention.streaming import CHUNK_TOKENS
from dist_attn.ops.sequence_call import Form, Forms, Implementation, Result, SequenceCall, find_form, register_form
from dist_attn.ops.softmax_attention import QueryPlacement
from dist_attn.sharded.block_table import Range
from dist_attn.sharded.prefix_scan import ScanExchange

SoftmaxExchange = Literal["reshuffle", "ring"]
CacheKept = Literal["spread", "whole"]

OPERATIONS_AHEAD = 4  # two layers of a convolution and a recurrence

_OVER_RANKS: Forms = {}


def over_ranks(kind: type[SequenceCall[Any]]) -> Callable[[Form], Form]:
    """Register a function of a `Sharding` and a call of this kind as the call's form over ranks.

    When it is called, every rank has made the same call on its own slice. It must exchange the same on every rank,
    those without tokens among them, and be differentiable; the gradients of what is equal on all ranks are shares.
    """
    return register_form(_OVER_RANKS, kind)


@dataclass(frozen=True)
class Sharding:
    """The ranks, the layouts of queries and of keys, and the choices that hold for every call.

    `deterministic`: with the bits of one rank. `threads` are those of rank 0 on its CPU, once ranks have met. The other
    choices are those of `ShardedSequenceOps`. `late` are waits for what states are filled in with, see `when_there`.

    Raises: ShapeError for a layout of another number of ranks, and for cuts that a deterministic sum cannot have.
    """

    comm: Communicator
    layout: SequenceLayout
    memory: SequenceLayout
    exchange: ScanExchange = field(default_factory=ScanExchange)
    softmax: SoftmaxExchange = "reshuffle"
    cache: CacheKept = "spread"
    deterministic: bool = False
    implementation: Implementation = "auto"
    threads: int = 1
    late: list[Callable[[], None]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for layout in (self.layout, self.memory):
            if layout.size != self.comm.size:
                raise ShapeError(f"the layout is for {layout.size} ranks, the communicator has {self.comm.size}")
            off = [cut for cut in layout.cuts if cut % CHUNK_TOKENS and cut != layout.total]
            if off and self.deterministic:
                raise ShapeError(
                    f"the layout has a cut at token {off[0]}; deterministic operations need cuts at multiples of "
                    f"{CHUNK_TOKENS}: SequenceLayout.even(total, ranks, {CHUNK_TOKENS})"
                )

    def one_way(self, x: torch.Tensor) -> bool:
        """Return whether ranks only send to those behind them, and the last one to all when these have gone on.

        Then no rank waits in a layer for one behind it. Not with gradients, in compiled graphs and on GPUs.
        """
        automatic = self.exchange.algorithm == "auto" and not self.deterministic
        plain = x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return automatic and plain and not self.packed

    def when_there(self, fill: Callable[[], None]) -> None:
        """Wait for an exchange and fill in what it brings: now, or inside `SequenceOps.deferred_states` at its end.

        A rank goes no more than `OPERATIONS_AHEAD` further, so that its last wait takes no longer than as many do.
        """
        if self.late is None:
            fill()
            return
        self.late.append(fill)
        if len(self.late) > OPERATIONS_AHEAD:
            self.late.pop(0)()

    @property
    def packed(self) -> bool:
        """Return whether documents start anywhere."""
        return bool(self.layout.documents or self.memory.documents)

    @property
    def words(self) -> str:
        """The settings that ranks must have in common before any call, so that the first that differs can be named."""
        exchange = self.exchange
        words = {
            "version": __version__,
            "exchange": exchange.algorithm,
            "pieces": exchange.pieces,
            "hosts": ";".join("+".join(map(str, host)) for host in exchange.hosts) or "none",
            "softmax": self.softmax,
            "cache": self.cache,
            "deterministic": self.deterministic,
        }
        named = " ".join(f"{name}={value}" for name, value in words.items())
        memory = " ".join(f"memory_{word}" for word in self.memory.description.split(" "))
        return f"{named} {self.layout.description} {memory}"

    def run(self, call: SequenceCall[Result]) -> Result:
        """Compute a call on this rank's slice, once every rank is found to make the same one.

        Cost: that of the form; 32 bytes to each other rank the first time that a communicator sees such a call.
        Raises: InputError for what the operation refuses; ShapeError for a slice of another length than the layout
            says; MismatchError on every rank, with what differs first; ConfigError without a form over ranks.
        """
        form = find_form(_OVER_RANKS, call, "over_ranks")
        if not call.deterministic:
            self.refuse_deterministic(call.operation)
        if self.packed and not call.packs:
            raise InputError(f"{call.operation} was given packed documents; it takes one unbroken sequence")
        along = dict.fromkeys(call.along, self.layout) | dict.fromkeys(call.along_memory, self.memory)
        for name, layout in along.items():
            for x in _tensors(getattr(call, name)):
                if x.dim() > call.dim:
                    self.check_tokens(_plain(name), x.shape[call.dim], layout)
        # In a compiled graph nothing is compared.
        if self.comm.size > 1 and not torch.compiler.is_compiling():
            words = [f"{_plain(name)}={_word(getattr(call, name), call.dim)}" for name in along]
            words += [word for name, value in call.settings().items() for word in _words(_plain(name), value)]
            words.append(f"gradients={_word(torch.is_grad_enabled())}")
            self.comm.agree_once(f"arguments of {call.operation}", " ".join(words))
        return form(self, replace(call, documents=(), implementation=self.implementation))  # type: ignore[no-any-return]

    def document_places(self) -> DocumentPlaces:
        """The places of this rank's tokens in their documents; an unbroken sequence is one."""
        layout = self.layout
        return document_places(layout.document_ranges(), *layout.range(self.comm.rank), layout.documents or ())

    def check_tokens(self, what: str, length: int, layout: SequenceLayout | None = None) -> None:
        """Raise ShapeError unless so many tokens are this rank's slice of the layout."""
        wanted = (layout or self.layout).lengths[self.comm.rank]
        if length != wanted:
            raise ShapeError(
                f"rank {self.comm.rank} was given {length} tokens in {what}; its slice of the layout has {wanted}"
            )

    def check_implementation(self) -> None:
        """Raise ConfigError for an implementation that does not exist, and for kernels by name where ranks have none.

        "native" is not refused here: its kernels take chunks one by one, and documents where attention is causal.
        """
        check_implementation(self.implementation)
        if self.implementation not in ("triton", "fla"):
            return
        reasons = {
            "deterministic=True": self.deterministic,
            "a layout with packed documents": bool(self.layout.documents),
            "a memory layout with packed documents": bool(self.memory.documents),
        }
        for words in (words for words, given in reasons.items() if given):
            raise ConfigError(
                f"implementation={self.implementation!r} and {words} were given, for which ranks have no kernels; "
                "use 'auto' or 'streaming'"
            )

    def refuse_deterministic(self, what: str) -> None:
        """Refuse with an InputError what cannot have the bits of one rank, where they are asked for."""
        if self.deterministic:
            raise InputError(
                f"{what} cannot promise the same bits for any number of ranks; leave out deterministic=True, or take "
                "a model of linear attention, affine recurrences and short convolutions"
            )

    def refuse_memory(self, operation: str) -> None:
        """Refuse with an InputError packed documents over a memory that is cut elsewhere."""
        if self.memory != self.layout:
            raise InputError(
                f"{operation} was given packed documents and a memory on its own layout; it takes documents where "
                "queries and keys lie on one layout"
            )


def placement_of(
    queries: Sequence[Range], keys: Sequence[Range], layout: SequenceLayout, memory: SequenceLayout
) -> QueryPlacement:
    """The placement of some ranges of queries on `layout` over some ranges of keys on `memory`.

    Raises: InputError when only one of the layouts has documents.
    """
    queries_L, keys_S = (torch.cat([torch.arange(*one, device="cpu") for one in ranges]) for ranges in (queries, keys))
    if not layout.documents and not memory.documents:
        return QueryPlacement(queries_L, keys_S)
    if layout.documents is None or memory.documents is None:
        raise InputError(
            "queries have documents and the memory has none, or the other way round; give both, or neither"
        )
    return QueryPlacement(
        queries_L, keys_S, _documents_at(layout.documents, queries_L), _documents_at(memory.documents, keys_S)
    )


def _documents_at(starts: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
    """The number of the document that each position belongs to."""
    return torch.bucketize(positions, torch.tensor(starts, dtype=torch.int64, device="cpu"), right=True)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument: one, a tuple of them, or none."""
    for x in value if isinstance(value, tuple) else (value,):
        if isinstance(x, torch.Tensor):
            yield x


def _plain(field: str) -> str:
    """The name of an argument, without the letters of its shape."""
    name, _, letters = field.rpartition("_")
    return name if letters.isupper() else field


def _words(name: str, value: object) -> Iterator[str]:
    """An argument in words that ranks compare one by one; one of several parts by its type, then part by part."""
    if not is_dataclass(value) or isinstance(value, FeatureMap):
        yield f"{name}={_word(value)}"
        return
    yield f"{name}={type(value).__name__}"
    for part in fields(value):
        yield from _words(f"{name}.{_plain(part.name)}", getattr(value, part.name))


def _word(value: object, dim: int | None = None) -> str:
    """An argument in one word: tensors by dtype and shape, but for the size of dimension `dim`."""
    if isinstance(value, torch.Tensor):
        sizes = ["any" if at == dim else str(size) for at, size in enumerate(value.shape)]
        return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(sizes)}]"
    if isinstance(value, tuple):
        return "+".join(_word(part, dim) for part in value)
    if isinstance(value, FeatureMap):
        return "+".join([type(value).__name__, *map(_word, value.tensors())])
    if value is not None and not isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        # Words with an address would differ between processes.
        raise TypeError(f"ranks cannot compare an argument of type {type(value).__name__}; list it in of_rank")
    return str(value).lower().replace(" ", "_")

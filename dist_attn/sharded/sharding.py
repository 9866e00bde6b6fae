"""The cut of one `ShardedSequenceOps`'s calls over ranks, what these must have in common, and what is refused.

A rank that leaves out a gate, takes another denominator or another scale sends messages of the size that the others
expect: without the comparison the result is wrong without an error. Between processes a message of another size or
dtype ends the process of the rank that receives it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dist_attn import __version__
from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError, InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, FeatureMap
from dist_attn.ops.linear_attention import Implementation, check_implementation
from dist_attn.ops.linear_attention.streaming import CHUNK_TOKENS
from dist_attn.ops.softmax_attention import QueryPlacement
from dist_attn.sharded.block_table import Range
from dist_attn.sharded.prefix_scan import ScanExchange

Setting = bool | int | float | str | Denominator | FeatureMap | torch.Tensor | None
SoftmaxExchange = Literal["reshuffle", "ring"]
CacheKept = Literal["spread", "whole"]


@dataclass(frozen=True)
class Sharding:
    """The ranks, the layouts of queries and of keys, and the choices that hold for every call.

    `deterministic`: with the bits of one rank. `threads` are those of rank 0 on its CPU, once ranks have met. The other
    choices are those of `ShardedSequenceOps`.

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

    def agree(
        self, operation: str, along: Mapping[str, torch.Tensor | None], dim: int = 1, **settings: Setting
    ) -> None:
        """Make sure that every rank calls `operation` with tensors of the same kind and the same settings.

        `along` are the tensors that are cut across ranks at dimension `dim`, the only size that may differ; tensors
        among the settings are compared in shape and dtype. In a compiled graph nothing is compared.

        Cost: 32 bytes to each other rank the first time that a communicator sees such a call, then nothing.
        Raises: MismatchError on every rank, with what differs first.
        """
        if self.comm.size == 1 or torch.compiler.is_compiling():
            return
        words = [f"{name}={_kind(x, dim)}" for name, x in along.items()]
        words += [f"{name}={_word(value)}" for name, value in settings.items()]
        self.comm.agree_once(f"arguments of {operation}", " ".join(words))

    def agree_on_tokens(
        self, operation: str, along: Mapping[str, torch.Tensor | None], dim: int = 1, **settings: Setting
    ) -> None:
        """`agree`, once the first tensor has as many tokens as this rank's slice of the layout."""
        first = next(iter(along.values()))
        assert first is not None
        self.check_queries(first.shape[dim], "tokens")
        self.agree(operation, along, dim, **settings)

    def check_queries(self, length: int, what: str = "queries") -> None:
        """Raise ShapeError unless so many tokens are this rank's slice of the layout."""
        self._check(what, length, self.layout)

    def check_keys(self, length: int) -> None:
        """Raise ShapeError unless so many keys are this rank's slice of the memory's layout."""
        self._check("keys", length, self.memory)

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

    def refuse_documents(self, operation: str) -> None:
        """Refuse packed documents with an InputError."""
        if self.packed:
            raise InputError(f"{operation} was given packed documents; it takes one unbroken sequence")

    def _check(self, what: str, length: int, layout: SequenceLayout) -> None:
        wanted = layout.lengths[self.comm.rank]
        if length != wanted:
            raise ShapeError(f"rank {self.comm.rank} was given {length} {what}; its slice of the layout has {wanted}")


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


def _kind(x: torch.Tensor | None, dim: int | None = None) -> str:
    """Dtype and shape, without the size of dimension `dim`."""
    if x is None:
        return "none"
    sizes = ["any" if at == dim else str(size) for at, size in enumerate(x.shape)]
    return f"{str(x.dtype).removeprefix('torch.')}[{'x'.join(sizes)}]"


def _word(value: Setting) -> str:
    if isinstance(value, torch.Tensor):
        return _kind(value)
    if isinstance(value, Denominator):
        return f"{value.kind}:{value.eps!r}"
    if value is None or isinstance(value, bool | int | float | str):
        return str(value).lower().replace(" ", "_")
    return "+".join([type(value).__name__, *map(_kind, value.tensors())])

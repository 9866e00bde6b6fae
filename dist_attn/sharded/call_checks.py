"""What `ShardedSequenceOps` refuses, whatever the operation: slices, modes and choices that a call cannot have."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError, InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops.linear_attention import Implementation, check_implementation
from dist_attn.sharded.call_agreement import Setting, agree_on_call
from dist_attn.sharded.in_order import check_grid

__all__ = ["CallChecks"]


@dataclass(frozen=True)
class CallChecks:
    """Of calls with queries on `layout` and keys on `memory`; `deterministic`: with the bits of one rank.

    Raises: ShapeError for a layout of another number of ranks, and for cuts that a deterministic sum cannot have.
    """

    comm: Communicator
    layout: SequenceLayout
    memory: SequenceLayout
    deterministic: bool

    def __post_init__(self) -> None:
        for given in (self.layout, self.memory):
            if given.size != self.comm.size:
                raise ShapeError(f"the layout is for {given.size} ranks, the communicator has {self.comm.size}")
            if self.deterministic:
                check_grid(given)

    @property
    def packed(self) -> bool:
        """Whether documents start anywhere."""
        return bool(self.layout.documents or self.memory.documents)

    def agree(self, operation: str, along: Mapping[str, torch.Tensor | None], dim: int, **settings: Setting) -> None:
        """See `call_agreement.agree_on_call`."""
        agree_on_call(self.comm, operation, along, dim, settings)

    def check_queries(self, length: int, what: str = "queries") -> None:
        """Raises ShapeError unless so many tokens are this rank's slice of the layout."""
        self._check(what, length, self.layout)

    def check_keys(self, length: int) -> None:
        """Raises ShapeError unless so many keys are this rank's slice of the memory's layout."""
        self._check("keys", length, self.memory)

    def check_implementation(self, implementation: Implementation) -> None:
        """Raises ConfigError for one that does not exist, and for kernels by name where ranks have none.

        "native" is not refused here: its kernels take chunks one by one, and documents where attention is causal.
        """
        check_implementation(implementation)
        if implementation != "triton":
            return
        reasons = {
            "deterministic=True": self.deterministic,
            "a layout with packed documents": bool(self.layout.documents),
            "a memory layout with packed documents": bool(self.memory.documents),
        }
        for words in (words for words, given in reasons.items() if given):
            raise ConfigError(
                f"implementation='triton' and {words} were given, for which ranks have no kernels; use 'auto' or "
                "'streaming'"
            )

    def refuse_deterministic(self, what: str) -> None:
        """Raises InputError for what cannot have the bits of one rank, where they are asked for."""
        if self.deterministic:
            raise InputError(
                f"{what} cannot promise the same bits for any number of ranks; leave out deterministic=True, or take "
                "a model of linear attention and short convolutions"
            )

    def refuse_memory(self, operation: str) -> None:
        """Raises InputError for packed documents over a memory that is cut elsewhere."""
        if self.memory != self.layout:
            raise InputError(
                f"{operation} was given packed documents and a memory on its own layout; it takes documents where "
                "queries and keys lie on one layout"
            )

    def refuse_documents(self, operation: str) -> None:
        """Raises InputError for packed documents."""
        if self.packed:
            raise InputError(f"{operation} was given packed documents; it takes one unbroken sequence")

    def _check(self, what: str, length: int, layout: SequenceLayout) -> None:
        wanted = layout.lengths[self.comm.rank]
        if length != wanted:
            raise ShapeError(f"rank {self.comm.rank} was given {length} {what}; its slice of the layout has {wanted}")

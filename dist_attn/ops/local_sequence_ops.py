"""`SequenceOps` over a sequence that lies whole in this process, in packed documents or not."""

from dataclasses import dataclass, replace

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.documents import DocumentPlaces, document_starts, places_of_all
from dist_attn.ops.linear_attention import check_implementation
from dist_attn.ops.sequence_call import Implementation, Result, SequenceCall, run_locally
from dist_attn.ops.sequence_ops import SequenceOps

__all__ = ["LocalSequenceOps"]


@dataclass(frozen=True)
class LocalSequenceOps(SequenceOps):
    """All operations on a sequence that lies whole in this process.

    `documents` are the positions at which packed documents start; None: one unbroken sequence. Documents never see each
    other. Tokens before the first start continue the document that a state or a tail given is of; states and tails that
    come out are those of the last document. Sums over the sequence and positions are those of the whole sequence.

    Raises: InputError for documents that are not rising whole numbers, and from operations that do not take them;
        ShapeError from operations for a document that starts behind the sequence, or for keys of another sequence;
        ConfigError for an implementation that does not exist, and from operations whose call it cannot take.
    """

    documents: tuple[int, ...] | None = None
    implementation: Implementation = "auto"  # of linear attention, see `ops.linear_attention.choose`

    def __post_init__(self) -> None:
        check_implementation(self.implementation)
        if self.documents is not None:
            object.__setattr__(self, "documents", document_starts(self.documents))

    def run(self, call: SequenceCall[Result]) -> Result:
        """See `SequenceOps.run`."""
        if self.documents and not call.packs:
            raise InputError(
                f"{call.operation} was given {len(self.documents)} packed documents; it takes one unbroken sequence. "
                "Call it once per document"
            )
        return run_locally(replace(call, documents=self.documents or (), implementation=self.implementation))

    def document_places(self, length: int) -> DocumentPlaces:
        """The places of the `length` tokens held here in their documents; an unbroken sequence is one.

        Raises: ShapeError for a document that starts behind the sequence.
        """
        return places_of_all(length, self.documents or ())

    def positions(self, length: int | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Global index of each of the `length` tokens held here, [L], counted from the start of this call's sequence.

        Raises: ShapeError without a length: only a layout would know it.
        """
        if length is None:
            raise ShapeError("positions() of a local sequence needs its length: positions(length)")
        return torch.arange(length, device=device)

    def total_length(self, length: int) -> int:
        """Tokens of the whole sequence when `length` of them are held here."""
        return length

    @property
    def cuts(self) -> tuple[int, ...]:
        """The positions at which the sequence is cut between processes; the same answer on every rank."""
        return ()

    @property
    def whole(self) -> bool:
        """Return whether all tokens are held here, whatever the layout; the same answer on every rank."""
        return True

"""Messages between the ranks that hold parts of one document, and between no others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.parts import connected

__all__ = ["Heard", "hear_from", "hear_from_start", "ranks_heard"]


def ranks_heard(layout: SequenceLayout, *, causal: bool, final: bool) -> list[tuple[int, ...]]:
    """The ranks that each rank hears from: of its first document, of its last unless `causal`, of the `final` one."""
    last = layout.ranks_of_last_document() if final else ()
    heard = (
        {*layout.ranks_before(rank), *(() if causal else layout.ranks_after(rank)), *last} - {rank}
        for rank in range(layout.size)
    )
    return [tuple(sorted(ranks)) for ranks in heard]


@final
@dataclass(frozen=True)
class Heard:
    """The messages of the ranks that this one hears from."""

    messages: dict[int, torch.Tensor]
    rows: torch.Tensor | None

    def connect(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, in a graph that reaches the exchange: every rank's backward pass goes through it, heard of or not."""
        return x if self.rows is None else connected(x, self.rows)


def hear_from(
    comm: Communicator,
    sources: Sequence[Sequence[int]],
    later: torch.Tensor,
    earlier: torch.Tensor | None = None,
    *,
    label: str,
) -> Heard:
    """Rank r hears from each rank of `sources[r]` what that has for later ranks, or for earlier ones.

    Shapes: later and earlier [...], equal on all ranks; so is each message.
    Cost: one message to each rank that hears from this one; backward the same the other way. Nothing at all, forward
        and backward, where no rank hears from another.
    """
    return hear_from_start(comm, sources, later, earlier, label=label)()


def hear_from_start(
    comm: Communicator,
    sources: Sequence[Sequence[int]],
    later: torch.Tensor,
    earlier: torch.Tensor | None = None,
    *,
    label: str,
) -> Callable[[], Heard]:
    """Launch a `hear_from`; what it gives waits for the messages."""
    if not any(sources):
        return lambda: Heard({}, None)
    targets = [rank for rank, heard in enumerate(sources) if comm.rank in heard]
    own = sorted(sources[comm.rank])
    sent = torch.stack([later, *(earlier if earlier is not None and r < comm.rank else later for r in targets)])[1:]
    running = collectives.send_receive_start(comm, sent, dict.fromkeys(targets, 1), dict.fromkeys(own, 1), label=label)

    def finish() -> Heard:
        rows = running.wait()
        return Heard(dict(zip(own, rows.unbind(0), strict=True)), rows)

    return finish


def starts_inside(layout: SequenceLayout, rank: int) -> tuple[int, ...]:
    """The starts of documents among the tokens of documents that lie whole on the rank."""
    first, inside, _ = layout.pieces(rank)
    return tuple(start - first for start in layout.documents_on(rank) if 0 <= start - first < inside)

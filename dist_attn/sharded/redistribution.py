"""Tensors from any block tables to any others, in one message per pair of ranks, with gradients.

Reference: Kabic et al., COSTA: Communication-Optimal Shuffle and Transpose Algorithm with Process Relabeling.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.sharded.block_table import BlockTable, Range
from dist_attn.sharded.redistribution_plan import RedistributionPlan


def redistribute(
    comm: Communicator, plan: RedistributionPlan, *tensors: torch.Tensor, label: str = "redistribution"
) -> tuple[torch.Tensor, ...]:
    """Bring every tensor to the tables `plan.targets`, and return this rank's blocks.

    All tensors are of one dtype. Gradients go the way back, and those of copies add up; every rank calls this and runs
    its backward pass, also with nothing of its own.
    Shapes: one [elements of the rank, numbers] for each of the plan's changes -> the same of its targets.
    Cost: one all-to-all of `plan.sends(rank)` numbers; its message and the one that comes are held at a time.
    Raises: ShapeError for tensors of another shape, dtype or number.
    """
    if comm.size != plan.ranks or len(tensors) != len(plan.changes) or len({x.dtype for x in tensors}) != 1:
        raise ShapeError(
            f"{len(tensors)} tensors of {sorted({str(x.dtype) for x in tensors})} on {comm.size} ranks were given; the "
            f"plan is for {len(plan.changes)} tensors of one dtype on {plan.ranks} ranks"
        )
    for change, x_EN in zip(plan.changes, tensors, strict=True):
        wanted = (change.source.elements(comm.rank), change.numbers)
        if x_EN.shape != wanted:
            raise ShapeError(
                f"rank {comm.rank} was given {list(x_EN.shape)}; its blocks of this table have {list(wanted)}"
            )
    outs: tuple[torch.Tensor, ...] = _Redistribute.apply(comm, plan, label, *tensors)  # type: ignore[no-untyped-call]
    return outs


def block_views(table: BlockTable, rank: int, x_EN: torch.Tensor) -> list[torch.Tensor]:
    """The blocks of `rank` as views, [rows, columns, N] or [elements, N] each, of what it keeps of a table."""
    blocks = table.of(rank)
    parts = x_EN.split([block.elements for block in blocks]) if blocks else ()
    return [part.view(*block.shape, x_EN.shape[1]) for part, block in zip(parts, blocks, strict=True)]


class _Redistribute(Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, plan: RedistributionPlan, label: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.plan, ctx.label = comm, plan, f"{label} backward"
        # All ranks must agree on whether a gradient will flow back.
        label = f"{label} with gradient" if any(ctx.needs_input_grad) else label
        sent = _pack(plan, comm.rank, tensors)
        received = comm.all_to_all(sent, plan.sends(comm.rank), plan.receives(comm.rank), label=label)
        del sent
        return _unpack(plan, comm.rank, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, None, *redistribute(ctx.comm, ctx.plan.adjoint, *gradients, label=ctx.label)


def _pack(plan: RedistributionPlan, rank: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack all that this rank sends, in order of receiver."""
    views = [block_views(change.source, rank, x.contiguous()) for change, x in zip(plan.changes, tensors, strict=True)]
    message = tensors[0].new_empty(sum(plan.sends(rank)))
    place = 0
    for pieces in plan.pieces[rank]:
        for piece in pieces:
            change = plan.changes[piece.change]
            rectangle = views[piece.change][piece.source][_slices(piece.source_ranges)]
            rectangle = rectangle.transpose(0, 1) if change.transpose else rectangle
            target = message[place : place + rectangle.numel()].view(rectangle.shape)
            if change.scale == 1.0:
                target.copy_(rectangle)
            else:
                torch.mul(rectangle, change.scale, out=target)
            place += rectangle.numel()
    return message


def _unpack(plan: RedistributionPlan, rank: int, message: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Add up what this rank keeps of each tensor: what came for each element, in order of sender."""
    outs = tuple(
        message.new_zeros((target.elements(rank), change.numbers))
        for change, target in zip(plan.changes, plan.targets, strict=True)
    )
    views = [block_views(target, rank, out) for target, out in zip(plan.targets, outs, strict=True)]
    place = 0
    for of_sender in plan.pieces:
        for piece in of_sender[rank]:
            rectangle = views[piece.change][piece.target][_slices(piece.target_ranges)]
            rectangle += message[place : place + rectangle.numel()].view(rectangle.shape)
            place += rectangle.numel()
    return outs


def _slices(ranges: Sequence[Range]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


def realign_tokens(
    comm: Communicator, source: SequenceLayout, target: SequenceLayout, x_BHLN: torch.Tensor, *, label: str
) -> torch.Tensor:
    """The tokens at the positions of this rank's slice of `target`; fewer where `source` ends before.

    Tokens behind the end of `target` stay where they are.

    Shapes: x [B, H, L of source, N] -> [B, H, at most L of target, N].
    Cost: one all-to-all of the tokens that change ranks, each of them once; nothing for equal layouts.
    """
    if source.cuts == target.cuts:
        return x_BHLN
    batch, heads, _, numbers = x_BHLN.shape
    mine = source.range(comm.rank)
    wanted = target.range(comm.rank)
    send = [_common(mine, target.range(rank)) for rank in range(comm.size)]
    receive = [_common(source.range(rank), wanted) for rank in range(comm.size)]
    rows_TN = x_BHLN[:, :, : sum(send)].permute(2, 0, 1, 3).reshape(sum(send), batch * heads * numbers)
    moved_TN = collectives.all_to_all(comm, rows_TN, send, receive, label=label)
    return moved_TN.reshape(sum(receive), batch, heads, numbers).permute(1, 2, 0, 3)


def _common(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))

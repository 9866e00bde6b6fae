"""Exact softmax attention across ranks, streaming: queries stay, keys and values travel round a ring of ranks.

Each rank attends to the slice that is with it, merges the partial result, and passes the slice on. The backward pass is
a second ring, in which the gradients of a slice travel with it and come home. No more than two slices are held at a
time. A causal sequence is uneven work, since the first rank sees its own slice only and the last one all of them.

Reference: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.softmax_attention import Placement, RelativePositions
from dist_attn.ops.softmax_attention.relative import Tables, tables_of
from dist_attn.ops.softmax_attention.shapes import check_softmax_shapes
from dist_attn.ops.softmax_attention.tiled import fold_in_place, tile_gradients, tile_outputs
from dist_attn.sharded.placements import placement_of

__all__ = ["ring_attention"]


def ring_attention(
    comm: Communicator,
    layout: SequenceLayout,
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    memory_layout: SequenceLayout | None = None,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """`ops.softmax_attention` on this rank's slice; keys lie on the memory layout, which may be cut elsewhere.

    Documents of the layouts attend to themselves; that of a memory attends to the document of the same number. Relative
    positions are equal on all ranks, and each has the gradients of its own queries.
    Shapes: as `ops.softmax_attention`, L and S local. Once differentiable.
    Cost: P - 1 rounds of one message, the B G S (K + V) elements of a slice of S keys; backward the same rounds again,
        and P rounds of as many gradients, in float32 or wider.
    Raises: ShapeError when shapes do not fit together.
    """
    check_softmax_shapes(q_BHLK, k_BGSK, v_BGSV)
    memory = layout if memory_layout is None else memory_layout
    batch, groups, _, size = k_BGSK.shape
    ring = _Ring(comm, layout, memory, causal, (batch, groups), size, v_BGSV.shape[3])
    tables = tables_of(relative, q_BHLK.shape[1], size, v_BGSV.shape[3])
    out = _RingAttention.apply(  # type: ignore[no-untyped-call]
        q_BHLK, k_BGSK, v_BGSV, *tables, ring, size**-0.5 if scale is None else scale
    )
    return cast(torch.Tensor, out)


@dataclass(frozen=True)
class _Ring:
    """Which slice is here in which round, where its keys stand, and how it goes on to the next rank."""

    comm: Communicator
    layout: SequenceLayout
    memory: SequenceLayout
    causal: bool
    heads: tuple[int, int]
    size: int
    values: int

    def placement(self, number: int) -> Placement:
        """Where this rank's queries stand, and the keys that are here in round `number`."""
        queries, keys = self.layout.range(self.comm.rank), self.memory.range(self._owner(number))
        return placement_of([queries], [keys], self.layout, self.memory)

    def join(self, k_BGSK: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        """Both as one message."""
        return torch.cat([k_BGSK.reshape(-1), v_BGSV.reshape(-1)])

    def split(self, message: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and the values in a message of round `number`."""
        batch, groups = self.heads
        keys = self.memory.lengths[self._owner(number)]
        k, v = message.split([batch * groups * keys * self.size, batch * groups * keys * self.values])
        return k.view(batch, groups, keys, self.size), v.view(batch, groups, keys, self.values)

    def pass_on(self, message: torch.Tensor, number: int, label: str) -> torch.Tensor:
        """Send what is here in round `number` to the next rank; what the rank before has sent."""
        ranks, rank = self.comm.size, self.comm.rank
        send, receive = [0] * ranks, [0] * ranks
        send[(rank + 1) % ranks] = message.numel()
        per_key = self.heads[0] * self.heads[1] * (self.size + self.values)
        receive[(rank - 1) % ranks] = per_key * self.memory.lengths[self._owner(number + 1)]
        return self.comm.all_to_all(message, send, receive, label=label)

    def _owner(self, number: int) -> int:
        return (self.comm.rank - number) % self.comm.size


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        near_keys: torch.Tensor | None,
        near_values: torch.Tensor | None,
        ring: _Ring,
        scale: float,
    ) -> torch.Tensor:
        # Whether a gradient will flow back is something that all ranks must agree on.
        label = "ring with gradient" if any(ctx.needs_input_grad) else "ring"
        tables = Tables(near_keys, near_values)
        out, lse = tile_outputs(q, k, v, ring.placement(0), ring.causal, scale, tables)
        message = ring.join(k, v)
        for number in range(1, ring.comm.size):
            message = ring.pass_on(message, number - 1, label)
            part = tile_outputs(q, *ring.split(message, number), ring.placement(number), ring.causal, scale, tables)
            lse = fold_in_place(out, lse, *part)
            del part
        ctx.save_for_backward(q, k, v, near_keys, near_values, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        q, k, v, *near, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        tables = Tables(*near)
        d_near = Tables(*(None if t is None else torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in near))
        drop = (d_out * out).sum(dim=-1)
        message, dq = ring.join(k, v), torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        d_message = torch.zeros(message.shape, dtype=lse.dtype, device=q.device)
        for number in range(ring.comm.size):
            keys, values = ring.split(message, number)
            d_q, d_keys, d_values, d_tables = tile_gradients(
                q, keys, values, lse, d_out, drop, ring.placement(number), ring.causal, ctx.scale, tables
            )
            dq += d_q
            d_message += ring.join(d_keys, d_values)
            for total, share in zip(d_near, d_tables, strict=True):
                if total is not None and share is not None:
                    total += share
            # The gradients make one round more than the keys: the last one takes them home.
            if number + 1 < ring.comm.size:
                message = ring.pass_on(message, number, "ring again")
            d_message = ring.pass_on(d_message, number, "ring backward")
        dk, dv = ring.split(d_message, 0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *d_near.like(tables), None, None

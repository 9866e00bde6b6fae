"""Exact softmax attention across ranks, streaming: queries stay, keys and values travel round a ring of ranks.

Each rank attends to the slice that is with it, merges the partial result, and passes the slice on. The backward pass is
a second ring, in which the gradients of a slice travel with it and come home. No more than two slices are held at a
time. A causal sequence is uneven work, since the first rank sees its own slice only and the last one all of them.

Reference: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context.

Shape letters: B batch, H heads of queries, G of keys, L queries and S keys here, K key size, V value size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.softmax_attention import SoftmaxCall
from dist_attn.ops.softmax_attention.tiled import (
    Partial,
    TileTensors,
    TileTerms,
    fold_in_place,
    tile_gradients,
    tile_outputs,
    with_sinks,
)
from dist_attn.sharded.sharding import Sharding, placement_of

__all__ = ["ring_attention"]


def ring_attention(sharding: Sharding, call: SoftmaxCall) -> torch.Tensor:
    """`ops.softmax_attention` on this rank's slice; keys lie on the layout of the memory, which may be cut elsewhere.

    Documents of the layouts attend to themselves; that of a memory attends to the document of the same number. Relative
    positions are equal on all ranks, and each has the gradients of its own queries.
    Shapes: as `ops.softmax_attention`, L and S local. Once differentiable.
    Cost: P - 1 rounds of one message, the B G S (K + V) elements of a slice of S keys; backward the same rounds again,
        and P rounds of as many gradients, in float32 or wider.
    Raises: ShapeError when shapes do not fit together.
    """
    call.check()
    batch, groups, _, size = call.k_BGSK.shape
    ring = _Ring(sharding, TileTerms.of(call), (batch, groups), size, call.v_BGSV.shape[3])
    part = Partial(*_RingAttention.apply(ring, *TileTensors.of(call)))  # type: ignore[no-untyped-call]
    return with_sinks(part, call.options.sinks_H).to(call.v_BGSV.dtype)


@dataclass(frozen=True)
class _Ring:
    """The ring of ranks that keys go round: whose slice is here in a round, where its keys stand, how it goes on.

    `call` are the terms of the call, in which each round takes the place of its keys.
    """

    sharding: Sharding
    call: TileTerms
    heads: tuple[int, int]
    size: int
    values: int

    @property
    def comm(self) -> Communicator:
        return self.sharding.comm

    @property
    def memory(self) -> SequenceLayout:
        return self.sharding.memory

    def terms(self, number: int) -> TileTerms:
        """The terms of round `number`: the places of this rank's queries and of the keys that are here."""
        queries, keys = self.sharding.layout.range(self.comm.rank), self.memory.range(self._owner(number))
        return self.call._replace(placement=placement_of([queries], [keys], self.sharding.layout, self.memory))

    def join(self, k_BGSK: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        """Join both to one message."""
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
    def forward(ctx: Any, ring: _Ring, *tensors: Any) -> Any:
        # All ranks must agree on whether a gradient will flow back.
        label = "ring with gradient" if any(ctx.needs_input_grad) else "ring"
        x = TileTensors(*tensors)
        total = tile_outputs(ring.terms(0), x)
        message = ring.join(x.k_BGSK, x.v_BGSV)
        for number in range(1, ring.comm.size):
            message = ring.pass_on(message, number - 1, label)
            k, v = ring.split(message, number)
            total = fold_in_place(total, tile_outputs(ring.terms(number), x._replace(k_BGSK=k, v_BGSV=v)))
        ctx.save_for_backward(*x, *total)
        ctx.ring = ring
        return tuple(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        x = TileTensors(*tensors)
        # Gradients of the queries and the tables stay here and add up; those of keys and values travel with them.
        total = x.without_keys().zeros(lse.dtype)
        drop = (d_out * out).sum(dim=-1) - d_lse
        message = ring.join(x.k_BGSK, x.v_BGSV)
        d_message = torch.zeros(message.shape, dtype=lse.dtype, device=message.device)
        for number in range(ring.comm.size):
            k, v = ring.split(message, number)
            share = tile_gradients(ring.terms(number), x._replace(k_BGSK=k, v_BGSV=v), lse, d_out, drop)
            d_message += ring.join(share.k_BGSK, share.v_BGSV)
            for own, more in zip(total, share.without_keys(), strict=True):
                if own is not None and more is not None:
                    own += more
            # The gradients make one round more than the keys: the last one takes them home.
            if number + 1 < ring.comm.size:
                message = ring.pass_on(message, number, "ring again")
            d_message = ring.pass_on(d_message, number, "ring backward")
        dk, dv = ring.split(d_message, 0)
        return (None, *total._replace(k_BGSK=dk, v_BGSV=dv).like(x))

"""Operations of which ranks exchange one small message: sums are added, maxima join in order.

Shape letters: B batch, H heads, L tokens here, S keys here, D channels, P ranks.
"""

import torch

from dist_attn.comm import differentiable as collectives
from dist_attn.ops.documents import SumCall, sums_of_documents
from dist_attn.ops.running_maximum import Element, Maxima, MaximumCall, join, maxima, scan_elements
from dist_attn.sharded.sharding import Sharding, over_ranks


@over_ranks(SumCall)
def sum_over_ranks(sharding: Sharding, call: SumCall) -> torch.Tensor:
    """The sums over the tokens of all ranks, on every rank.

    Cost: one all-reduce of B D elements, or of B N D for N documents.
    """
    if not call.by_document:
        return collectives.all_reduce_sum(sharding.comm, call.x_BLD.sum(dim=1), label="sum over sequence")
    sums_BND = sums_of_documents(call.x_BLD, sharding.document_places())
    return collectives.all_reduce_sum(sharding.comm, sums_BND, label="sum over documents")


@over_ranks(MaximumCall)
def sharded_running_maximum(sharding: Sharding, call: MaximumCall) -> Maxima:
    """`ops.running_maximum` of the keys on this rank; `before` is the one before the first global token.

    The maximum after is that after the last global token, on every rank.

    Cost: an all-gather of 16 B H bytes, forward alone.
    """
    if call.log_gate_BHS is not None:
        sharding.refuse_deterministic("the running maximum of gated keys")
    comm, documents = sharding.comm, sharding.memory.documents_on(sharding.comm.rank)
    x_BHS, before_BH = call.x_BHS, call.before_BH
    scanned = scan_elements(x_BHS, call.log_gate_BHS, documents)
    with torch.no_grad():
        own = Element(torch.zeros_like(before_BH), torch.full_like(before_BH, -torch.inf))  # of no tokens
        if x_BHS.shape[2]:
            own = Element(scanned.decay[..., -1], scanned.level[..., -1])
        message_2BH = torch.stack([own.decay.double(), own.level.double()])
        elements_P2BH = collectives.all_gather(comm, message_2BH, label="running maximum")
        start = after = before_BH.detach().double()
        for rank, (decay, level) in enumerate(elements_P2BH.unbind()):
            after = join(Element(torch.zeros_like(after), after), Element(decay, level)).level
            if rank < comm.rank:
                start = after
    return maxima(scanned, start, documents)._replace(after_BH=after)

"""What a request draws beside others, as digests that say whether any bit depends on them."""

import hashlib
from collections.abc import Iterator, Sequence

import torch

from dist_attn.models import CausalModel
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.rank.state_bytes import write_state
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry

__all__ = ["COMPANIES", "digests"]

COMPANIES = (0, 1, 3, 7, 15)
"""How many others draw in the slots before a request's own, which is the last one that is filled."""
TEXT, DRAWN = 20, 4


@torch.inference_mode()
def digests(model: CausalModel, *, vocabulary: int, companies: Sequence[int] = COMPANIES) -> Iterator[str]:
    """SHA-256 of the tokens, log-probabilities and state of one request, beside each number of others."""
    generator = torch.Generator().manual_seed(3)
    tokens_NL = torch.randint(3, vocabulary, (1 + max(companies), TEXT), generator=generator)
    states = [model.hidden(tokens_1L)[1] for tokens_1L in tokens_NL.split(1)]
    for company in companies:
        slots, digest = DecodeSlots(model), hashlib.sha256()
        requests = [*range(1, company + 1), 0]
        for request in requests:
            slots.take_in(request, states[request], SamplingSpec(DRAWN, seed=request, logprobs=5))
        for draw in range(DRAWN):
            for result in slots.draw([DecodeEntry(request, None if draw else 5) for request in requests]):
                if result.request == 0:
                    digest.update(repr(result).encode())
        digest.update(write_state(slots.state_of(0)[0]))
        yield digest.hexdigest()

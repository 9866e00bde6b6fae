"""The scan of two ranks: each sends the other its element."""

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError
from dist_attn.sharded.prefix_scan.monoid import Monoid
from dist_attn.sharded.prefix_scan.steps import Finish, from_one, swap_start

__all__ = ["start"]


def start(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """Launch the exchange; waiting gives the elements before this rank, combined, and those of both ranks.

    Cost: |x| bytes in 1 message, 1 step; backward the same.
    Raises: ConfigError for another number of ranks than two.
    """
    if comm.size != 2:
        raise ConfigError(f"the exchange `pair` is for 2 ranks, there are {comm.size}; use `gather` or `log_step`")
    launched = swap_start(comm, element_BHX, 1 - comm.rank)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        other_BHX = from_one(launched.wait())
        if comm.rank == 0:
            return torch.zeros_like(element_BHX), monoid.combine(element_BHX, other_BHX)
        return other_BHX, monoid.combine(other_BHX, element_BHX)

    return finish

"""What each rank brings to an exchange, and what another gets of it: known to all ranks without asking."""

import torch
from torch import Tensor

from dist_attn.comm import Communicator


def brought(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What rank `rank` brings: the same numbers whoever asks."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def everyone(comm: Communicator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What all ranks bring, [P, *shape]."""
    return torch.stack([brought(rank, *shape, dtype=dtype) for rank in range(comm.size)])


def ordered_sum(x: Tensor) -> Tensor:
    """x[0] + x[1] + … from left to right, in float32 for half precision."""
    total = x[0].float() if x.dtype in (torch.bfloat16, torch.float16) else x[0].clone()
    for part in x[1:]:
        total = total + part
    return total.to(x.dtype)


def counts_between(sender: int, receiver: int, size: int) -> int:
    """An uneven table of row counts with zeros in it, also on the diagonal."""
    return (3 * sender + 2 * receiver + size) % 4


def rows_of(comm: Communicator, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[int]]:
    """Each rank's rows for an all-to-all by `counts_between`, and this rank's receive counts."""
    ranks = range(comm.size)
    rows = [
        brought(sender, sum(counts_between(sender, to, comm.size) for to in ranks), *shape, dtype=dtype)
        for sender in ranks
    ]
    return rows, [counts_between(sender, comm.rank, comm.size) for sender in ranks]


def exchanged(rows: list[Tensor], receiver: int) -> Tensor:
    """What `receiver` gets when every rank's rows are split by `counts_between`."""
    size = len(rows)
    return torch.cat(
        [x.split([counts_between(sender, to, size) for to in range(size)])[receiver] for sender, x in enumerate(rows)]
    )


def sends_of(comm: Communicator) -> list[int]:
    """This rank's send counts."""
    return [counts_between(comm.rank, to, comm.size) for to in range(comm.size)]


def passed(sender: int, receiver: int, size: int) -> int:
    """A sparse table of row counts: each rank sends to the next one and, an even one, to the one after that."""
    step = receiver - sender
    return 3 if step == 1 else sender + 1 if step == 2 and sender % 2 == 0 else 0


def pass_counts(comm: Communicator) -> tuple[dict[int, int], dict[int, int]]:
    """This rank's part of `passed`, named in descending order; pairs without rows stand in it or not, by turns."""
    others = [rank for rank in reversed(range(comm.size)) if rank != comm.rank]
    send = {rank: passed(comm.rank, rank, comm.size) for rank in others}
    recv = {rank: passed(rank, comm.rank, comm.size) for rank in others}
    keep = comm.rank % 2 == 0
    return {r: n for r, n in send.items() if n or keep}, {r: n for r, n in recv.items() if n or keep}


def passed_rows(size: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Each rank's rows for a send_receive by `passed`."""
    ranks = range(size)
    return [brought(sender, sum(passed(sender, to, size) for to in ranks), *shape, dtype=dtype) for sender in ranks]


def passed_on(rows: list[Tensor], receiver: int) -> Tensor:
    """What `receiver` gets when every rank's rows are split by `passed`."""
    size = len(rows)
    parts = [x.split([passed(sender, to, size) for to in range(size)])[receiver] for sender, x in enumerate(rows)]
    return torch.cat(parts)


def affine(rank: int, dtype: torch.dtype) -> Tensor:
    """x -> (1 + slope) x + offset as [slope, offset] rows, in small whole numbers: any order gives the same bits."""
    return torch.tensor([[rank % 2, 0, 1], [rank, 1, -rank]], dtype=dtype)


def after(earlier: Tensor, later: Tensor) -> Tensor:
    """One map after another; zeros are the map that changes nothing."""
    slopes = (1 + earlier[0]) * (1 + later[0]) - 1
    return torch.stack([slopes, earlier[1] * (1 + later[0]) + later[1]])

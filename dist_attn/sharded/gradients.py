"""Sums of gradients over the ranks, a bucket of them at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dist_attn.comm import Communicator
from dist_attn.ops.device import send

BUCKET_BYTES = 32 << 20


def sum_gradients(comm: Communicator, parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> Tensor:
    """Replace every gradient by its sum over the ranks; the losses are shares, so nothing is divided.

    A parameter without a gradient on some ranks has a zero one there. How many ranks had one comes back for each that
    is learned [N], where the gradients lie, so that the host need not wait for it; alone, nothing.

    Cost: each rank sends and receives 2 (P-1)/P of the gradients' bytes.
    """
    learned = [p for p in parameters if p.requires_grad]
    if comm.size == 1 or not learned:
        return torch.empty(0, device="cpu")
    device = learned[0].device
    present_N = torch.tensor([p.grad is not None for p in learned], dtype=torch.int32, device="cpu")
    ranks_with_one_N = comm.all_reduce_sum(send(present_N, device), label="which gradients")
    bucket: list[nn.Parameter] = []
    for parameter in sorted(learned, key=lambda p: str(p.dtype)):  # types that alternate would make a bucket of each
        if bucket and (_bytes(bucket) + _bytes([parameter]) > bucket_bytes or _kind(bucket[0]) != _kind(parameter)):
            _sum_bucket(comm, bucket)
            bucket = []
        bucket.append(parameter)
    _sum_bucket(comm, bucket)
    return ranks_with_one_N


def drop_missing(parameters: Sequence[nn.Parameter], ranks_with_one: Sequence[float]) -> None:
    """Take the gradient of a parameter away where no rank had one; `sum_gradients` says which."""
    if ranks_with_one:
        for parameter, ranks in zip((p for p in parameters if p.requires_grad), ranks_with_one, strict=True):
            if not ranks:
                parameter.grad = None


def _bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _sum_bucket(comm: Communicator, bucket: Sequence[nn.Parameter]) -> None:
    flat_N = comm.all_reduce_sum(torch.cat([_gradient(p).reshape(-1) for p in bucket]), label="gradients")
    for parameter, sum_N in zip(bucket, flat_N.split([p.numel() for p in bucket]), strict=True):
        parameter.grad = sum_N.view_as(parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

"""Gradients of ranks that hold the same parameters become those of the whole batch: sums in a few large exchanges."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dist_attn.comm import Communicator

__all__ = ["sum_gradients"]

BUCKET_BYTES = 32 << 20


def sum_gradients(comm: Communicator, parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replace every gradient by its sum over the ranks; the losses are shares, so nothing is divided.

    A parameter without a gradient on some ranks has a zero one there, and none if it has none on any.

    Cost: each rank sends and receives 2 (P-1)/P of the gradients' bytes.
    """
    if comm.size == 1:
        return
    learned = [p for p in parameters if p.requires_grad]
    present_N = torch.tensor([p.grad is not None for p in learned], dtype=torch.int32)
    wanted = comm.all_reduce_sum(present_N, label="which gradients").tolist()
    bucket: list[nn.Parameter] = []
    for parameter in (p for p, ranks in zip(learned, wanted, strict=True) if ranks):
        if bucket and (_bytes(bucket) + _bytes([parameter]) > bucket_bytes or bucket[0].dtype != parameter.dtype):
            _sum_bucket(comm, bucket)
            bucket = []
        bucket.append(parameter)
    if bucket:
        _sum_bucket(comm, bucket)


def _bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _sum_bucket(comm: Communicator, bucket: Sequence[nn.Parameter]) -> None:
    flat_N = comm.all_reduce_sum(torch.cat([_gradient(p).reshape(-1) for p in bucket]), label="gradients")
    for parameter, sum_N in zip(bucket, flat_N.split([p.numel() for p in bucket]), strict=True):
        parameter.grad = sum_N.view_as(parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

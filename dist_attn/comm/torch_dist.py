"""Ranks as processes over torch.distributed: gloo between CPUs and NCCL between GPUs, by the same code."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import Call, Pending
from dist_attn.errors import CommError, ConfigError

__all__ = ["TorchDistCommunicator"]

# torch 2.13 renamed it and warns about the old name on every rank; older ones know only the old name.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

POISON = 0xFF  # as any float type, bytes of ones are NaN

Result = TypeVar("Result")


@final
class TorchDistCommunicator(Communicator):
    """One rank of a torch.distributed process group; use `connect` to make one.

    `poison` fills receive buffers with NaN first, so that a part which no rank wrote shows in tests.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout_s: float, *, owned: bool, poison: bool = False
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group), timeout_s)
        self._group: dist.ProcessGroup | None = group
        self._device = device
        self._owned = owned
        self._poison = poison
        self._failure = ""

    @classmethod
    def connect(
        cls,
        backend: str,
        *,
        timeout_s: float,
        device: torch.device,
        meeting: str | Store = "env://",
        rank: int = -1,
        size: int = -1,
        poison: bool = False,
    ) -> "TorchDistCommunicator":
        """Join the ranks at a `meeting`: an URL (by default what torchrun put into the environment), or a store.

        A process group that already exists, as FSDP makes one, is used as it is and left open by `close`.

        Raises: CommError if the ranks do not come together within the deadline; ConfigError without the back end.
        """
        if not dist.is_available() or not dist.is_backend_available(backend):
            raise ConfigError(f"this torch {torch.__version__} has no {backend} back end; use gloo on CPUs")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        owned = not dist.is_initialized()
        url, store = (meeting, None) if isinstance(meeting, str) else (None, meeting)
        if owned:
            if backend == "nccl":
                # Without it a late rank aborts the process from a watchdog thread and nobody can report it.
                os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            try:
                dist.init_process_group(
                    backend,
                    init_method=url,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout_s),
                )
            except (RuntimeError, ValueError) as error:
                place = f" at {url}" if url else ""
                raise CommError(
                    f"rank {_given(rank, 'RANK')} of {_given(size, 'WORLD_SIZE')} could not join the {backend} group"
                    f"{place} within {timeout_s:g} s: {_first_line(error)}; are all ranks started?"
                ) from error
        group = dist.group.WORLD
        if group is None:
            raise CommError("torch.distributed is initialised but has no default group; leave it to open_communicator")
        return cls(group, device, timeout_s, owned=owned, poison=poison)

    def _gather(self, call: Call, sent: Tensor) -> Pending:
        source = sent.to(self._device)
        received = self._buffer(self.size * sent.numel())
        if not sent.numel():
            return Pending(lambda: received.to(sent.device))
        all_gather = getattr(dist, _ALL_GATHER)
        work = self._guarded(call, lambda: all_gather(received, source, group=self._group, async_op=True))

        def finish() -> Tensor:
            self._guarded(call, work.wait)
            self._settle(call)
            return received.to(sent.device)

        return Pending(finish)

    def _exchange(self, call: Call, sent: Tensor, send_bytes: list[int], recv_bytes: list[int]) -> Pending:
        received = self._buffer(sum(recv_bytes))
        source = sent.to(self._device)
        all_to_all = dist.all_to_all_single
        work = self._guarded(
            call, lambda: all_to_all(received, source, recv_bytes, send_bytes, group=self._group, async_op=True)
        )

        def finish() -> Tensor:
            self._guarded(call, work.wait)
            self._settle(call)
            return received.to(sent.device)

        return Pending(finish)

    def _send_receive(
        self, call: Call, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]
    ) -> Pending:
        received = self._buffer(sum(recv_bytes.values()))
        source = sent.to(self._device)
        group = self._group
        steps = [
            *_partners(dist.isend, source, send_bytes, group),
            *_partners(dist.irecv, received, recv_bytes, group),
        ]
        works = self._guarded(call, lambda: dist.batch_isend_irecv(steps) if steps else [])

        def finish() -> Tensor:
            for work in works:
                self._guarded(call, work.wait)
            self._settle(call)
            return received.to(sent.device)

        return Pending(finish)

    def _broadcast(self, call: Call, sent: Tensor, source: int) -> Tensor:
        copy = sent.to(self._device, copy=True)
        if sent.numel():
            self._guarded(call, lambda: dist.broadcast(copy, group_src=source, group=self._group))
            self._settle(call)
        return copy.to(sent.device)

    def _subgroup(self, groups: Sequence[tuple[int, ...]]) -> Communicator:
        own: dist.ProcessGroup | None = None
        for ranks in groups:  # torch wants every rank to make every group
            try:
                made = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s), backend=self.backend)
            except (RuntimeError, ValueError) as error:
                raise CommError(
                    f"rank {self.rank} of {self.size} could not join the group of ranks {', '.join(map(str, ranks))}: "
                    f"{_first_line(error)}"
                ) from error
            if self.rank in ranks:
                own = made
        assert own is not None  # every rank is in one of the groups
        return TorchDistCommunicator(own, self._device, self.timeout_s, owned=True, poison=self._poison)

    def close(self) -> None:
        """Leave the group and, if it was made here, take it down."""
        if self._group is not None and self._owned and dist.is_initialized():
            # Without a name all groups go, also those that were split off and not closed.
            dist.destroy_process_group(None if self._group is dist.group.WORLD else self._group)
        self._group = None

    def _buffer(self, size: int) -> Tensor:
        if self._poison:
            return torch.full((size,), POISON, dtype=torch.uint8, device=self._device)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _guarded(self, call: Call, operation: Callable[[], Result]) -> Result:
        """Run one torch collective; whatever it raises becomes a CommError that names rank and operation."""
        if self._group is None:
            raise CommError(f"rank {self.rank} called {call} after it closed its communicator; close it last")
        if self._failure:
            raise CommError(f"rank {self.rank} of {self.size} cannot do {call}: {self._failure}")
        began = time.monotonic()
        try:
            return operation()
        except (RuntimeError, ValueError) as error:
            self._failure = f"{call} failed after {time.monotonic() - began:.1f} s: {_first_line(error)}"
            raise CommError(
                f"rank {self.rank} of {self.size} ({self.backend}): {self._failure}. A rank died, is late by more than "
                f"{self.timeout_s:g} s or called something else: look at the output of the other ranks"
            ) from error

    def _settle(self, call: Call) -> None:
        """On a GPU a collective has only been queued so far: wait here, where a failure can still be named."""
        if self._device.type == "cuda":
            self._guarded(call, torch.cuda.current_stream(self._device).synchronize)


def _partners(
    operation: Callable[..., object], data: Tensor, counts: Mapping[int, int], group: dist.ProcessGroup | None
) -> list[dist.P2POp]:
    """One send or receive for each rank in `counts`, of the next part of `data`."""
    parts = data.split(list(counts.values())) if counts else ()
    return [dist.P2POp(operation, part, group=group, group_peer=rank) for rank, part in zip(counts, parts, strict=True)]


def _given(value: int, variable: str) -> str:
    return str(value) if value >= 0 else os.environ.get(variable, "?")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

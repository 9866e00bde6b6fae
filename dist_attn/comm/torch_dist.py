"""Ranks as processes over torch.distributed: gloo between CPUs and NCCL between GPUs, by the same code."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, _set_pg_timeout
from torch.futures import Future

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import EVENTS_KEPT, ExchangeCall, Pending, first_line
from dist_attn.errors import CommError, ConfigError

__all__ = ["TorchDistCommunicator"]

# torch 2.13 renamed it and warns about the old name on every rank; older ones know only the old name.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

POISON = 0xFF  # as any float type, bytes of ones are NaN

# Variables that an NCCL group reads when it is made; those of the environment count first. An exchange is only queued,
# so it is not the caller but torch's watchdog thread that finds one which failed or is late.
_NCCL_VARIABLES = {
    # The watchdog shall abort the communicators (2), so that whoever waits for the GPU wakes up, and leave it to the
    # main thread to say what failed: by default (3) it ends the process. TORCH_NCCL_BLOCKING_WAIT, which has no
    # watchdog, would stop the host at every exchange.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Before it aborts it sleeps four times as long as a dump of past exchanges may take, by default 4 x 15 s.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# For NCCL to join the ranks, load its kernels and connect them in the first exchange; 4 cold GPUs may take 30 s.
NCCL_START_S = 300.0

Result = TypeVar("Result")


@final
class TorchDistCommunicator(Communicator):
    """One rank of a torch.distributed process group; use `connect` to make one.

    Over NCCL an exchange is queued on the GPU, as a kernel is: a wait for it holds up what is queued after it and not
    the host, and its deadline also counts what the GPU has to do before it. `check_exchanges` finds what failed; so do
    the next exchange, and a wait whose result goes to the host.

    `poison` fills receive buffers with NaN first, so that a part which no rank wrote shows in tests.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        *,
        owned: bool,
        backend: str = "",
        poison: bool = False,
    ) -> None:
        backend = backend or dist.get_backend(group)
        super().__init__(dist.get_rank(group), dist.get_world_size(group), backend, timeout_s)
        self._group: dist.ProcessGroup | None = group
        self._device = device
        self._owned = owned
        self._poison = poison
        self._failure = ""
        self._queued: deque[tuple[ExchangeCall, Future[int]]] = deque(
            maxlen=EVENTS_KEPT
        )  # over NCCL, since the last check
        self._parts: WeakSet[TorchDistCommunicator] = WeakSet()

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
        if backend == "nccl" and not hasattr(dist.ProcessGroupNCCL, "get_error"):
            raise ConfigError(f"torch {torch.__version__} does not say which NCCL exchange failed; install a newer one")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            device = torch.device("cuda", torch.cuda.current_device())
        owned = not dist.is_initialized()
        url, store = (meeting, None) if isinstance(meeting, str) else (None, meeting)
        start_s = _start_s(backend, timeout_s)
        try:
            if owned:
                if backend == "nccl":
                    for name, value in _NCCL_VARIABLES.items():
                        os.environ.setdefault(name, value)
                dist.init_process_group(
                    backend,
                    init_method=url,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=start_s),
                    # With it NCCL's communicators are made now and not by the first exchange.
                    device_id=device if backend == "nccl" else None,
                )
            group = dist.group.WORLD
            if group is None:
                raise CommError(
                    "torch.distributed is initialised but has no default group; leave it to open_communicator"
                )
            comm = cls(group, device, timeout_s, owned=owned, poison=poison)
            comm._meet()
        except (RuntimeError, ValueError, CommError) as error:
            if owned and dist.is_initialized():  # who tries again makes a new one
                with suppress(RuntimeError, ValueError):
                    dist.destroy_process_group()
            if isinstance(error, CommError):
                raise
            place = f" at {url}" if url else ""
            raise CommError(
                f"rank {_given(rank, 'RANK')} of {_given(size, 'WORLD_SIZE')} could not join the {backend} group"
                f"{place} within {start_s:g} s: {first_line(error)}; are all ranks started?"
            ) from error
        return comm

    def _meet(self) -> None:
        """Perform a group's first exchanges, in which all its ranks take part; later waits end at the deadline.

        In these NCCL connects the ranks: the first one of a group must not be a `_send_receive`, which ranks without a
        partner leave out.
        """
        own = torch.zeros(self.size, dtype=torch.uint8, device=self._device)
        every = own.new_zeros(self.size * self.size)
        getattr(dist, _ALL_GATHER)(every, own, group=self._group)
        dist.all_to_all_single(every[: self.size], own, group=self._group)
        self._raise_queued(ExchangeCall("the first exchange"))
        self.set_deadline(self.timeout_s)

    def set_deadline(self, timeout_s: float) -> None:
        """Set it for a group that was made here; any other one keeps the deadline that it came with."""
        super().set_deadline(timeout_s)
        if self._owned and self._group is not None:
            _set_pg_timeout(timedelta(seconds=timeout_s), self._group)

    def _gather(self, call: ExchangeCall, sent: Tensor) -> Pending:
        source = sent.to(self._device)
        received = self._buffer(self.size * sent.numel())
        if not sent.numel():
            return Pending(lambda: received.to(sent.device))
        all_gather = getattr(dist, _ALL_GATHER)
        work = self._guarded(call, lambda: all_gather(received, source, group=self._group, async_op=True))
        return self._pending(call, [work], received, sent)

    def _exchange(self, call: ExchangeCall, sent: Tensor, send_bytes: list[int], recv_bytes: list[int]) -> Pending:
        received = self._buffer(sum(recv_bytes))
        source = sent.to(self._device)
        all_to_all = dist.all_to_all_single
        work = self._guarded(
            call, lambda: all_to_all(received, source, recv_bytes, send_bytes, group=self._group, async_op=True)
        )
        return self._pending(call, [work], received, sent)

    def _send_receive(
        self, call: ExchangeCall, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]
    ) -> Pending:
        received = self._buffer(sum(recv_bytes.values()))
        source = sent.to(self._device)
        group = self._group
        steps = [
            *_partners(dist.isend, source, send_bytes, group),
            *_partners(dist.irecv, received, recv_bytes, group),
        ]
        works = self._guarded(call, lambda: dist.batch_isend_irecv(steps) if steps else [])
        # NCCL gives one work for all of them.
        return self._pending(call, works, received, sent, sends=len(send_bytes) if len(works) == len(steps) else 0)

    def _broadcast(self, call: ExchangeCall, sent: Tensor, source: int) -> Tensor:
        copy = sent.to(self._device, copy=True)
        if not sent.numel():
            return copy.to(sent.device)
        work = self._guarded(call, lambda: dist.broadcast(copy, group_src=source, group=self._group, async_op=True))
        return self._pending(call, [work], copy, sent).wait()

    def _pending(
        self, call: ExchangeCall, works: Sequence[dist.Work], received: Tensor, sent: Tensor, sends: int = 0
    ) -> Pending:
        """Wrap the launched `works`, `sends` first; the wait gives `received` on the device of `sent`."""
        if self.backend == "nccl":
            # Not the works themselves, which would keep the tensors of a whole step.
            self._queued.extend((call, cast(Any, work).get_future_result()) for work in works)

        left = list(works)  # to be waited for: each once

        def wait(sends: int) -> Tensor:
            while len(left) > sends:
                self._guarded(call, left.pop().wait)
            result = received.to(sent.device)
            if result.device.type != self._device.type:
                # Whoever reads it on the host believes that it has come.
                self._raise_queued(call)
            return result

        return Pending(partial(wait, 0), partial(wait, sends))

    def _subgroup(self, groups: Sequence[tuple[int, ...]]) -> Communicator:
        own: dist.ProcessGroup | None = None
        for ranks in groups:  # torch wants every rank to make every group
            try:
                start_s = _start_s(self.backend, self.timeout_s)
                made = dist.new_group(list(ranks), timeout=timedelta(seconds=start_s), backend=self.backend)
            except (RuntimeError, ValueError) as error:
                raise CommError(
                    f"rank {self.rank} of {self.size} could not join the group of ranks {', '.join(map(str, ranks))}: "
                    f"{first_line(error)}"
                ) from error
            if self.rank in ranks:
                own = made
        assert own is not None  # every rank is in one of the groups
        part = TorchDistCommunicator(own, self._device, self.timeout_s, owned=True, poison=self._poison)
        part._guarded(ExchangeCall("the first exchange"), part._meet)
        self._parts.add(part)
        return part

    def check_exchanges(self) -> None:
        call = ExchangeCall("check_exchanges")
        for comm in (self, *self._parts):
            comm._raise_queued(call)

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

    def _guarded(self, call: ExchangeCall, operation: Callable[[], Result]) -> Result:
        """Run one torch collective; whatever it raises becomes a CommError that names rank and operation."""
        if self._group is None:
            raise CommError(f"rank {self.rank} called {call} after it closed its communicator; close it last")
        self._find_failure()
        if self._failure:
            raise CommError(f"rank {self.rank} of {self.size} cannot do {call}: {self._failure}")
        began = time.monotonic()
        try:
            return operation()
        except (RuntimeError, ValueError) as error:
            self._failure = f"{call} failed after {time.monotonic() - began:.1f} s: {first_line(error)}"
            raise CommError(
                f"rank {self.rank} of {self.size} ({self.backend}): {self._failure}. A rank died, is late by more than "
                f"{self.timeout_s:g} s or called something else: look at the output of the other ranks"
            ) from error

    def _raise_queued(self, call: ExchangeCall) -> None:
        """Wait until what was queued is done, and raise what failed by then, or before."""
        if self._group is not None and self._device.type == "cuda":
            self._guarded(call, torch.cuda.current_stream(self._device).synchronize)
        self._find_failure()
        if self._failure:
            raise CommError(f"rank {self.rank} of {self.size} ({self.backend}): {self._failure}")
        self._queued.clear()

    def _find_failure(self) -> None:
        """Remember whether the watchdog of an NCCL group has found an exchange that failed; it does not wait for it.

        The watchdog says so before it aborts what the GPU waits for, so nobody reads a result of it unwarned.
        """
        if self._failure or self.backend != "nccl" or self._group is None:
            return
        found = cast(Any, self._group._get_backend(self._device)).get_error()
        if found.name != "SUCCESS":
            self._failure = (
                f"{first_failed(self._queued)} failed ({found.name}). A rank died, is late by more than "
                f"{self.timeout_s:g} s or called something else: look at the output of the other ranks"
            )


def communicator_of(group: Any, timeout_s: float = 300.0) -> TorchDistCommunicator:
    """The communicator of a process group of torch.distributed, of a device mesh of one dimension, or of all ranks.

    Over NCCL it is for this process's current GPU. The group stays the caller's.

    Raises: ConfigError for anything else.
    """
    if group is None:
        group = dist.group.WORLD
    if hasattr(group, "get_group"):
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"a group of type {type(group).__name__} was given; needed is a process group of torch.distributed, a "
            "device mesh of one dimension or a Communicator"
        )
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))  # by kind of device
    gpu = torch.cuda.is_available() and backends.get("cuda") == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if device.type not in backends:
        raise ConfigError(f"the group is for {', '.join(backends)}; needed is gloo for CPUs or nccl for GPUs")
    comm = TorchDistCommunicator(group, device, timeout_s, owned=False, backend=backends[device.type])
    comm._meet()
    return comm


def first_failed(queued: Sequence[tuple[ExchangeCall, Future[int]]]) -> str:
    """Name the first exchange that did not end well.

    torch gives an exchange a result some time after its end, 0 where it went well.
    """
    for call, result in queued:
        if result.done() and result.wait() != 0:
            return str(call)
    return f"one of {len(queued)} exchanges, the last of them {queued[-1][0]}," if queued else "an exchange"


def _start_s(backend: str, timeout_s: float) -> float:
    """The seconds that ranks may take to come together and to exchange something for the first time."""
    return max(timeout_s, NCCL_START_S) if backend == "nccl" else timeout_s


def _partners(
    operation: Callable[..., object], data: Tensor, counts: Mapping[int, int], group: dist.ProcessGroup | None
) -> list[dist.P2POp]:
    """Make one send or receive for each rank in `counts`, of the next part of `data`."""
    parts = data.split(list(counts.values())) if counts else ()
    return [dist.P2POp(operation, part, group=group, group_peer=rank) for rank, part in zip(counts, parts, strict=True)]


def _given(value: int, variable: str) -> str:
    return str(value) if value >= 0 else os.environ.get(variable, "?")

"""The exclusive scan of states over ranks: one interface, several exchanges, the same result to rounding."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast, final, get_args

import torch

from dist_attn.comm import Communicator
from dist_attn.costs import Calibration, calibration_file, read_calibration
from dist_attn.errors import ConfigError
from dist_attn.ops import LinearState
from dist_attn.sharded.prefix_scan import exscan, gather, log_step, pair, pipelined_ring, serial_ring, two_level
from dist_attn.sharded.prefix_scan.element import pack, unpack

__all__ = [
    "Algorithm",
    "Exchange",
    "RunningScan",
    "exclusive_scan",
    "exclusive_scan_start",
    "settle",
]

Algorithm = Literal["auto", "pair", "gather", "exscan", "log_step", "two_level", "pipelined_ring", "serial_ring"]


@dataclass(frozen=True)
class Exchange:
    """How states travel between ranks; equal on all ranks.

    `auto` is what `dist-attn doctor --calibrate` found fastest on the machine of rank 0, else `costs.default_exchange`.
    `pieces` is into how many parts the pipelined ring cuts a state; `hosts` are the ranks of each host for the
    two-level exchange, by default those that the launcher started together. `settle` fills in these and `calibration`.

    Raises: ConfigError for an unknown algorithm or no pieces.
    """

    algorithm: Algorithm = "auto"
    pieces: int = 4
    hosts: tuple[tuple[int, ...], ...] = ()
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(
                f"exchange {self.algorithm!r} is unknown; use one of {', '.join(map(str, get_args(Algorithm)))}"
            )
        if self.pieces < 1:
            raise ConfigError(f"a ring in {self.pieces} pieces was asked for; it needs 1 or more")

    def resolved(self, comm: Communicator, message_bytes: int) -> "Exchange":
        """This exchange, settled, with `auto` replaced by what suits a message of this size."""
        if self.algorithm != "auto":
            return self
        calibration = Calibration() if self.calibration is None else self.calibration
        name = calibration.choose(comm.backend, comm.size, message_bytes, self.hosts)
        return replace(self, algorithm=cast(Algorithm, name))


def settle(comm: Communicator, exchange: Exchange) -> Exchange:
    """The exchange with all that the ranks have to learn of each other for it: measured times, and hosts.

    Every rank calls this. What was settled before is as it is, so that nothing is looked up inside a compiled graph.
    """
    if comm.size == 1 or exchange.calibration is not None or exchange.algorithm not in ("auto", "two_level"):
        return exchange
    if exchange.algorithm == "two_level":
        return exchange if exchange.hosts else replace(exchange, hosts=comm.hosts())
    if comm.backend == "simulated":  # threads of one process have one host, and nobody measures them
        return replace(exchange, calibration=Calibration())
    text = comm.told_by_first("calibration", lambda: read_calibration(calibration_file(os.environ)).to_json())
    return replace(exchange, calibration=Calibration.from_json(text), hosts=exchange.hosts or comm.hosts())


@final
class RunningScan:
    """A scan that is under way; `wait` on every rank, once."""

    def __init__(self, finish: Callable[[], tuple[LinearState, LinearState]]) -> None:
        self._finish = finish

    def wait(self) -> tuple[LinearState, LinearState]:
        """The state before this rank's first token and the one after the last token of all ranks."""
        return self._finish()


def exclusive_scan(
    comm: Communicator, element: LinearState, initial: LinearState | None = None, exchange: Exchange | None = None
) -> tuple[LinearState, LinearState]:
    """The state before this rank's first token and the one after the last token of all ranks.

    `element` is what this rank's tokens leave behind by themselves, `initial` the state before the first global token,
    equal on all ranks. Every rank takes part, forward and backward; gradients of `initial` are this rank's share.

    Cost: with |x| = 4 B H (M (V + 1) + 2) bytes (8 in place of 4 for float64), that of the exchange: see the
        `start` of each algorithm and `costs.scan_cost`. One rank alone exchanges nothing.
    """
    return exclusive_scan_start(comm, element, initial, exchange).wait()


def exclusive_scan_start(
    comm: Communicator, element: LinearState, initial: LinearState | None = None, exchange: Exchange | None = None
) -> RunningScan:
    """Launch an `exclusive_scan`: what its algorithm can send before it has received anything is under way."""
    first = _on_first_rank(comm, element, initial)
    if comm.size == 1:
        return RunningScan(lambda: (first, first.combine(element)))
    packed_BHX = pack(first.combine(element))
    settled = settle(comm, Exchange() if exchange is None else exchange)
    chosen = settled.resolved(comm, packed_BHX.numel() * packed_BHX.element_size())
    finish = _starter(chosen)(comm, packed_BHX)

    def states() -> tuple[LinearState, LinearState]:
        # Through one tensor: whichever of the two a loss depends on, its gradient goes through the whole exchange.
        before_BHX, after_BHX = torch.stack(finish()).unbind(0)
        after = unpack(after_BHX, element)
        if initial is not None:  # no document starts among the elements, but one may have before them
            after = replace(after, reset_BH=initial.reset_BH)
        return first.combine(unpack(before_BHX, element)), after

    return RunningScan(states)


def _on_first_rank(comm: Communicator, element: LinearState, initial: LinearState | None) -> LinearState:
    """`initial` on rank 0 and the identity elsewhere, in the same graph."""
    if initial is None:
        batch, heads, features, values = element.s_BHMV.shape
        dtype, device = element.s_BHMV.dtype, element.s_BHMV.device
        return LinearState.identity(batch, heads, features, values, dtype=dtype, device=device)
    here = torch.tensor(comm.rank == 0, device=element.s_BHMV.device)
    return LinearState(*(torch.where(here, t, torch.zeros_like(t)) for t in initial.tensors()))


def _starter(
    exchange: Exchange,
) -> Callable[[Communicator, torch.Tensor], Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    if exchange.algorithm == "two_level":
        return partial(two_level.start, hosts=exchange.hosts)
    if exchange.algorithm == "pipelined_ring":
        return partial(pipelined_ring.start, pieces=exchange.pieces)
    return {
        "pair": pair.start,
        "gather": gather.start,
        "exscan": exscan.start,
        "log_step": log_step.start,
        "serial_ring": serial_ring.start,
    }[exchange.algorithm]

"""The exclusive scan over ranks: one interface, several exchanges, the same result to rounding."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

import torch

from dist_attn.comm import Communicator
from dist_attn.costs import Calibration, calibration_file, read_calibration
from dist_attn.errors import ConfigError
from dist_attn.ops.monoid import Carry, Monoid
from dist_attn.sharded.prefix_scan.exchanges import (
    Finish,
    start_exscan,
    start_gather,
    start_log_step,
    start_pair,
    start_serial_ring,
)
from dist_attn.sharded.prefix_scan.pieces import start_pipelined_ring, start_two_level
from dist_attn.wire.choices import EXCHANGES, StateExchange

State = TypeVar("State", bound=Carry)
Algorithm = StateExchange


@dataclass(frozen=True)
class ScanExchange:
    """A way of moving states between ranks; equal on all ranks.

    `auto` is what `dist-attn doctor --measure` found fastest on the machine of rank 0, else `costs.default_exchange`.
    `pieces` is into how many parts the pipelined ring cuts a state; `hosts` are the ranks of each host for the
    two-level exchange, by default those that the launcher started together. `settle` fills in hosts and `calibration`.

    Raises: ConfigError for an unknown algorithm or no pieces.
    """

    algorithm: Algorithm = "auto"
    pieces: int = 4
    hosts: tuple[tuple[int, ...], ...] = ()
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in EXCHANGES:
            raise ConfigError(f"exchange {self.algorithm!r} is unknown; use one of {', '.join(EXCHANGES)}")
        if self.pieces < 1:
            raise ConfigError(f"a ring in {self.pieces} pieces was asked for; it needs 1 or more")

    def resolved(self, comm: Communicator, message_bytes: int) -> "ScanExchange":
        """This exchange, settled, with `auto` replaced by what suits a message of this size."""
        if self.algorithm != "auto":
            return self
        calibration = Calibration() if self.calibration is None else self.calibration
        name = calibration.choose(comm.backend, comm.size, message_bytes, self.hosts)
        return replace(self, algorithm=cast(StateExchange, name))


def settle(comm: Communicator, exchange: ScanExchange) -> ScanExchange:
    """The exchange with all that the ranks have to learn of each other for it: measured times, and hosts.

    Every rank calls this. What was settled before is as it is, so that nothing is looked up inside a compiled graph.
    """
    if comm.size == 1 or exchange.calibration is not None or exchange.algorithm not in ("auto", "two_level"):
        return exchange
    if exchange.algorithm == "two_level":
        return exchange if exchange.hosts else replace(exchange, hosts=comm.hosts())
    if comm.backend == "simulated":  # threads of one process have one host, and are not measured
        return replace(exchange, calibration=Calibration())
    text = comm.told_by_first("calibration", lambda: read_calibration(calibration_file(os.environ)).to_json())
    return replace(exchange, calibration=Calibration.from_json(text), hosts=exchange.hosts or comm.hosts())


def scan_over_ranks(
    comm: Communicator,
    monoid: Monoid,
    own: torch.Tensor,
    initial: torch.Tensor | None = None,
    exchange: ScanExchange | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The messages of all ranks before this one, combined, and of all ranks; both behind `initial`.

    `own` is the message of this rank's tokens by themselves, `initial` that of what lies before the first global token,
    equal on all ranks. Every rank takes part, forward and backward; gradients of `initial` are this rank's share.

    Shapes: own, initial [..., X] -> twice [..., X].
    Cost: that of the exchange with |x| bytes in a message: see the `start` of each algorithm and `costs.scan_cost`.
        One rank alone exchanges nothing.
    """
    return scan_over_ranks_start(comm, monoid, own, initial, exchange)()


def scan_over_ranks_start(
    comm: Communicator,
    monoid: Monoid,
    own: torch.Tensor,
    initial: torch.Tensor | None = None,
    exchange: ScanExchange | None = None,
) -> Finish:
    """Launch `scan_over_ranks`: what its algorithm can send before it has received anything is under way.

    What it gives waits for the rest; every rank calls that once.
    """
    first = torch.zeros_like(own)
    if initial is not None:  # on every rank in the same graph
        first = torch.where(torch.full((), comm.rank == 0, device=own.device), initial, first)
    with_first = monoid.combine(first, own)
    if comm.size == 1:
        return lambda: (first, with_first)
    settled = settle(comm, ScanExchange() if exchange is None else exchange)
    chosen = settled.resolved(comm, with_first.numel() * with_first.element_size())
    finish = _starter(chosen)(comm, monoid, with_first)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        # Through one tensor: whichever of the two a loss depends on, its gradient goes through the whole exchange.
        before, after = torch.stack(finish()).unbind(0)
        return monoid.combine(first, before), after

    return results


def exclusive_scan(
    comm: Communicator, element: State, initial: State | None = None, exchange: ScanExchange | None = None
) -> tuple[State, State]:
    """`scan_over_ranks` of states: that before this rank's first token, and the global last.

    Cost: |x| bytes of a message: of kernel attention 4 B H (M (V + 1) + 2), of an affine recurrence 4 B H (K V + |A|)
        with 1, K or K^2 numbers |A| (8 in place of 4 for float64).
    """
    return exclusive_scan_start(comm, element, initial, exchange)()


def exclusive_scan_start(
    comm: Communicator, element: State, initial: State | None = None, exchange: ScanExchange | None = None
) -> Callable[[], tuple[State, State]]:
    """Launch an `exclusive_scan`, as `scan_over_ranks_start`."""
    before_all = None if initial is None else initial.pack()
    finish = scan_over_ranks_start(comm, element.monoid, element.pack(), before_all, exchange)
    # Of what is no number of a message, such as a flag of kernel attention, elements have none, but `initial` may.
    like = element if initial is None else initial

    def states() -> tuple[State, State]:
        before, after = finish()
        return like.unpack(before), like.unpack(after)

    return states


def _starter(exchange: ScanExchange) -> Callable[[Communicator, Monoid, torch.Tensor], Finish]:
    if exchange.algorithm == "two_level":
        return partial(start_two_level, hosts=exchange.hosts)
    if exchange.algorithm == "pipelined_ring":
        return partial(start_pipelined_ring, pieces=exchange.pieces)
    return {
        "pair": start_pair,
        "gather": start_gather,
        "exscan": start_exscan,
        "log_step": start_log_step,
        "serial_ring": start_serial_ring,
    }[exchange.algorithm]

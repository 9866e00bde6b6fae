"""Trials of flash-linear-attention's kernels by ranks that compute one text: all of them take the kernels, or none.

Trials of a host's ranks take turns and may take minutes, so that ranks meet behind them with a deadline of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from dist_attn.comm import Communicator
from dist_attn.ops.affine import AffineCall
from dist_attn.ops.affine.implementation import fla_operation, stream_from_now_on, try_kernels
from dist_attn.ops.affine.trial import WAIT_S, end_trials, found_right
from dist_attn.sharded.sharding import Sharding

__all__ = ["end_trials_together", "try_together"]

KINDS_KEPT = 1024  # of calls that ranks have told each other of; all ranks forget together

_met: "WeakKeyDictionary[Communicator, set[str]]" = WeakKeyDictionary()


def try_together(sharding: Sharding, call: AffineCall) -> None:
    """Try the kernels of a call of all ranks before they exchange anything of it.

    What one rank cannot take, or did not find right, streams on all. A kind of call is met once by a communicator; in
    a compiled graph ranks do not meet.

    Cost: a line of text to each other rank where the call is of a new kind; then nothing.
    Raises: CommError if a rank is not through after two times `trial.WAIT_S`.
    """
    if call.implementation != "auto" or call.v_BHLV.device.type != "cuda":
        return
    comm, layout = sharding.comm, sharding.layout
    # What a rank tries depends on documents that begin in its slice, and all ranks must know who has met what.
    packed = [bool(layout.documents_on(rank)) for rank in range(comm.size)] if layout.documents else []
    of_all = fla_operation(call), call.products_dtype(), call.state_shape, call.needs_gradients, packed
    met = _met.setdefault(comm, set())
    if torch.compiler.is_compiling() or str(of_all) in met:
        return
    own = try_kernels(call)
    with _patience(comm):
        told = comm.all_gather_text(own or "", label="trials")
    streaming = [f"rank {rank}: {reason}" for rank, reason in enumerate(told) if reason.strip()]
    if own is None and streaming:
        stream_from_now_on(call, streaming[0])
    # Where some stream from now on, so do their calls of this kind beside other ranks' of another one.
    if 0 < len(streaming) < comm.size or len(met) == KINDS_KEPT:
        met.clear()
    met.add(str(of_all))


def end_trials_together(comm: Communicator) -> list[str]:
    """End the trials of all ranks, as `trial.end_trials`: what did not come out right on one of them streams on all.

    Raises: as `try_together`.
    """
    with _patience(comm):
        told = comm.all_gather_text("\n".join(found_right()), label="trials")
    return end_trials(set.intersection(*(set(text.split("\n")) for text in told)))


@contextmanager
def _patience(comm: Communicator) -> Iterator[None]:
    """Wait for others' trials: the last one begins when it has waited as long as it may, and takes as long at most."""
    before = comm.timeout_s
    comm.set_deadline(max(before, 2 * WAIT_S))
    try:
        yield
    finally:
        comm.set_deadline(before)

"""Trials of kernels by ranks that compute one text: all of them take the kernels, or none.

Trials of a host's ranks take turns and may take minutes, so that ranks meet behind them with a deadline of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from dist_attn.comm import Communicator
from dist_attn.ops.linear_attention import LinearCall
from dist_attn.ops.linear_attention.implementation import attempt
from dist_attn.ops.linear_attention.trial import Form
from dist_attn.ops.trial import WAIT_S, Attempt, end_trials, found_right, overrule

__all__ = ["end_trials_together", "try_linear", "try_together"]

KINDS_KEPT = 1024  # of calls that ranks have told each other of; all ranks forget together

_met: "WeakKeyDictionary[Communicator, set[str]]" = WeakKeyDictionary()


def try_together(comm: Communicator, attempts: Sequence[Attempt], met_by: object = None) -> None:
    """Try the kernels of a call of all ranks, by "auto" on GPUs, before they exchange anything of it.

    What one rank cannot take, or did not find right, streams on all. A kind of call is met once by a communicator; in
    a compiled graph ranks do not meet. All ranks give as many attempts. `met_by` is what they know the call by, all
    of them alike, where their attempts may differ.

    Cost: a line of text to each other rank where the call is of a new kind; then nothing.
    Raises: CommError if a rank is not through after two times `trial.WAIT_S`.
    """
    if torch.compiler.is_compiling():
        return
    key = str(met_by or [one.kind.words for one in attempts])
    met = _met.setdefault(comm, set())
    if key in met:
        return
    own = [one.why_not() or "" for one in attempts]
    with _patience(comm):
        told = comm.all_gather_text("\n".join(" ".join(reason.split()) for reason in own), label="trials")
    parted, of_attempts = False, zip(*(text.split("\n") for text in told), strict=True)
    for one, mine, of_ranks in zip(attempts, own, of_attempts, strict=True):
        streaming = [f"rank {rank}: {reason}" for rank, reason in enumerate(of_ranks) if reason.strip()]
        if not mine and streaming:
            overrule(one.kind, streaming[0])
        parted |= 0 < len(streaming) < comm.size
    # Where some stream from now on, so do their calls of this kind beside other ranks' of another one.
    if parted or len(met) == KINDS_KEPT:
        met.clear()
    met.add(key)


def try_linear(comm: Communicator, call: LinearCall, sums: torch.dtype, *forms: Form) -> None:
    """`try_together` for forms of a call of linear attention, with sums of at least this precision."""
    if call.implementation == "auto" and call.v_BHSV.device.type == "cuda":
        attempts = [attempt(call, form, sums) for form in forms]
        # Kernels also go by these types, which are no part of a kind: calls that they refuse have met nobody for it.
        types = [sums, *(t.dtype for t in (call.q_BHLK, call.k_BHSK, call.v_BHSV))]
        try_together(comm, attempts, [*(one.kind.words for one in attempts), *types])


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

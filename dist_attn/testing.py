"""Checks for whoever cuts a sequence across ranks: mixers, and other implementations of context parallelism.

`check_context_parallel` runs a function over simulated ranks in the cuts, with the documents and states, at which such
implementations go wrong, against the same function on one rank, and names what is broken:

    cut         outputs differ where a text is cut into slices
    empty       ... where a rank has no tokens
    halo        ... where slices are shorter than what a convolution looks back over
    order       ... and are those of ranks in another order
    leak        tokens of one document change another one, or have a gradient from it
    documents   outputs of packed documents are not those of each by itself
    state       a state before the first token is left out, or the state after the last one is not that of one rank
    gradient    gradients of inputs, parameters or of the state before, added up over ranks, are not those of one rank
    hang        ranks did not make the same exchanges
    error       a rank raised an error of its own, as where a cut is refused
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import CommError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers.contract import check_mixer

__all__ = ["Forward", "Run", "Subject", "check_context_parallel", "check_mixer", "context_parallel_faults"]

Forward = Callable[
    [Communicator, SequenceLayout, Tensor, Tensor | None, Sequence[Tensor]], tuple[Tensor, Tensor | None]
]
"""This rank's outputs [B, L local, D'] and the state after the last global token, from its slice [B, L local, D], the
state before the first one, which is None where nothing came before, and the parameters."""
Run = Callable[[Callable[[Communicator], Any], int], list[Any]]
"""What a function gives on each of so many ranks; where these are processes, what it calls is pickled."""
THREADS: Run = partial(run_simulated, timeout_s=20.0)
# Outputs and states of the ranks; for each loss the gradients of x, the parameters and the state before, added up.
Found = tuple[list[Tensor], list[Tensor | None], list[list[Tensor]]]

CUTS = {
    "cut": ((20, 9, 32), (1, 40, 20)),
    "empty": ((20, 0, 41), (0, 61, 0)),
    "halo": ((58, 1, 1, 1), (1, 1, 1, 58)),
}
STARTS = ((0, 20, 33), (7, 29, 30, 60))  # at cuts and off them; tokens before the first one go on from the state
DOCUMENT_CUTS = ((20, 9, 32), (20, 0, 41), (58, 1, 1, 1))
EVEN_CUTS = ((30, 30), (20, 20, 20), (15, 15, 15, 15))


@dataclass(frozen=True)
class Subject:
    """A subject of checks: the function, its input [B, 61, D] in float64, and parameters and a state with gradients.

    Without `state` nothing is asked about states. `packs`: it takes packed documents, which the layout tells. Without
    `uneven` the first 60 tokens are cut into equal slices alone. `run` starts the ranks, by default as threads.
    """

    forward: Forward
    x_BLD: Tensor
    parameters: Sequence[Tensor] = ()
    state: Tensor | None = None
    packs: bool = True
    uneven: bool = True
    tolerance: float = 1e-9
    run: Run = THREADS


@dataclass(frozen=True)
class _Failure:
    """The fault for which ranks gave nothing."""

    name: str
    words: str


def check_context_parallel(subject: Subject) -> None:
    """Raise AssertionError with the names of all that is broken; see `context_parallel_faults`."""
    faults = context_parallel_faults(subject)
    if faults:
        raise AssertionError("; ".join(f"{name}: {words}" for name, words in faults.items()))


def context_parallel_faults(subject: Subject) -> dict[str, str]:
    """Each fault by its name, with the first case in which it showed; empty where there is none."""
    faults: dict[str, str] = {}
    if not subject.uneven:
        subject = replace(subject, x_BLD=subject.x_BLD[:, :60])
    for name, words in (*_of_one_text(subject), *(_of_documents(subject) if subject.packs else ())):
        faults.setdefault(name, words)
    return faults


def _of_one_text(subject: Subject) -> Iterator[tuple[str, str]]:
    total = subject.x_BLD.shape[1]
    for before in (None, subject.state) if subject.state is not None else (None,):
        want = _run(subject, SequenceLayout((0, total)), before)
        assert not isinstance(want, _Failure), want.words
        for name, cuts in CUTS.items() if subject.uneven else (("cut", EVEN_CUTS),):
            for lengths in cuts:
                where = f"slices of {lengths} tokens{' from a state' * (before is not None)}"
                got = _run(subject, SequenceLayout.from_lengths(lengths), before)
                if isinstance(got, _Failure):
                    yield got.name, f"{where}: {got.words}"
                    continue
                yield from _differences(subject, name, where, got, want, before is not None)


def _differences(
    subject: Subject, name: str, where: str, got: Found, want: Found, from_state: bool
) -> Iterator[tuple[str, str]]:
    out_BLD, want_BLD = torch.cat(got[0], dim=1), want[0][0]
    if out_BLD.shape != want_BLD.shape:
        yield name, f"{where}: outputs have shape {list(out_BLD.shape)} in place of {list(want_BLD.shape)}"
        return
    if not _near(out_BLD, want_BLD, subject.tolerance):
        turned = torch.cat(got[0][::-1], dim=1)
        named = "order" if _near(turned, want_BLD, subject.tolerance) else "state" if from_state else name
        yield named, f"{where}: outputs are off by {float((out_BLD - want_BLD).abs().max()):.1e}"
        return  # states and gradients are others then
    for rank, state in enumerate(got[1]):
        wanted = want[1][0]
        kept = wanted is None or (state is not None and _near(state, wanted, subject.tolerance))
        if subject.state is not None and not kept:
            yield "state", f"{where}: the state after is another one on rank {rank}"
    names = ["x", *(f"parameter {n}" for n in range(len(subject.parameters))), "the state before"]
    for of, mine, theirs in zip(names, got[2][0], want[2][0], strict=False):
        if not _near(mine, theirs, 10 * subject.tolerance):
            yield "gradient", f"{where}: the gradient of {of} is off by {float((mine - theirs).abs().max()):.1e}"


def _of_documents(subject: Subject) -> Iterator[tuple[str, str]]:
    total = subject.x_BLD.shape[1]
    for every_start in STARTS:
        starts = [start for start in every_start if start < total]
        edges = [*([] if starts[0] == 0 else [0]), *starts, total]
        parts = [_run(subject, SequenceLayout((0, b - a)), None, tokens=slice(a, b)) for a, b in pairwise(edges)]
        want_BLD = torch.cat([part[0][0] for part in parts if not isinstance(part, _Failure)], dim=1)
        for lengths in DOCUMENT_CUTS if subject.uneven else EVEN_CUTS:
            where = f"documents at {starts} in slices of {lengths} tokens"
            layout = SequenceLayout.from_lengths(lengths, starts)
            got = _run(subject, layout, None, losses=[slice(*edge) for edge in pairwise(edges)])
            if isinstance(got, _Failure):
                yield got.name, f"{where}: {got.words}"
                continue
            out_BLD = torch.cat(got[0], dim=1)
            for document, (start, stop) in enumerate(pairwise(edges)):
                outside_L = got[2][document][0].abs().sum((0, 2))
                outside_L[start:stop] = 0
                if bool(outside_L.any()):
                    token = int(outside_L.nonzero()[0])
                    yield "leak", f"{where}: document {document} has a gradient for token {token}, of another one"
                if not _near(out_BLD[:, start:stop], want_BLD[:, start:stop], subject.tolerance):
                    yield "documents", f"{where}: document {document} is not what it is by itself"


def _run(
    subject: Subject,
    layout: SequenceLayout,
    before: Tensor | None,
    *,
    tokens: slice = slice(None),
    losses: Sequence[slice] = (),
) -> Found | _Failure:
    """Outputs, states and gradients over ranks.

    Gradients are those of all outputs and the state after, or of the outputs of each of these tokens.
    """
    x_BLD = subject.x_BLD[:, tokens].detach()
    try:
        ranks = subject.run(partial(_on_rank, subject, layout, x_BLD, before, losses), layout.size)
    except CommError as error:
        return _Failure("hang", str(error).partition("\n")[0])
    except Exception as error:
        return _Failure("error", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    gradients = [
        [torch.stack(parts).sum(0) for parts in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*(grads for _, _, grads in ranks), strict=True)
    ]
    return [out for out, _, _ in ranks], [after for _, after, _ in ranks], gradients


def _on_rank(
    subject: Subject,
    layout: SequenceLayout,
    x_BLD: Tensor,
    before: Tensor | None,
    losses: Sequence[slice],
    comm: Communicator,
) -> tuple[Tensor, Tensor | None, list[list[Tensor]]]:
    start, stop = layout.range(comm.rank)
    mine, *parameters = (t.detach().clone().requires_grad_() for t in (x_BLD, *subject.parameters))
    state = None if before is None else before.detach().clone().requires_grad_()
    leaves = [mine, *parameters] if state is None else [mine, *parameters, state]
    out_BLD, after = subject.forward(comm, layout, mine[:, start:stop], state, parameters)
    measured = out_BLD.sin() + out_BLD.square()
    parts = [measured[:, max(at.start - start, 0) : max(at.stop - start, 0)].sum() for at in losses]
    if not parts:
        parts = [measured.sum() if after is None else measured.sum() + after.square().sum() / comm.size]
    grads = [
        list(torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True))
        for loss in parts
    ]
    return out_BLD.detach(), None if after is None else after.detach(), grads


def _near(got: Tensor, want: Tensor, tolerance: float) -> bool:
    if got.shape != want.shape or not got.numel():
        return got.shape == want.shape
    return float((got - want).abs().max()) <= tolerance * (1 + float(want.abs().max()))

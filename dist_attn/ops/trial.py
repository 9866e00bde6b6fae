"""Trials of kernels on this GPU: one of each kind of call in a process, before the first such call.

Outputs, the state after and, where they are asked for, all gradients of a few chunks of random numbers are compared
with the streaming form's in float32; where they differ, or the kernels raise, calls of this kind stream, with a
warning. Processes of a host take turns, so that the first compiles and measures, and the others read what it kept in
TRITON_CACHE_DIR. A rank of the service runs its trials before it is ready and ends them: no request waits for one.
Ranks that compute one text tell each other what theirs came to (`sharded.trials`).
"""

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from dist_attn.ops.device import send

__all__ = ["CLOSED", "STARTS", "TOKENS", "Attempt", "Compare", "Kind", "Results", "end_trials", "found_right"]
__all__ += ["name_of", "overrule", "results_of", "way_of", "why_not_right_here"]

TOKENS, STARTS, CLOSED = 170, (30, 100), 90  # two chunks of 64 and a part; where documents start; a closed gate
TOLD_S = 10.0  # of waiting for them without a word
WAIT_S = 600.0  # for trials of other processes of this host at most
ACCEPTED = 0.03  # of `_error`: some roundings of bfloat16; a token that is all wrong comes to a multiple of it

Results = dict[str, torch.Tensor]
Compare = Callable[[], tuple[Results, Results]]
"""Runs both: the results of the kernels, and those of the streaming form in float32."""


class Kind(Protocol):
    """Calls for which kernels are compiled once, whatever the number of tokens; it can be hashed."""

    @property
    def device(self) -> torch.device:
        """The GPU."""

    @property
    def words(self) -> str:
        """The kind as people are told of it: whose kernels, of which version, and everything but the device."""


@dataclass(frozen=True)
class Attempt:
    """A kind of call, and why kernels do not compute it here: a trial may be run to find that out."""

    kind: Kind
    why_not: Callable[[], str | None]


_outcomes: dict[Kind, str | None] = {}
_ended = False


def why_not_right_here(kind: Kind, compare: Compare) -> str | None:
    """The reason why the kernels did not come out right in the trial of this kind, or None; it runs now if none did."""
    if kind not in _outcomes:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return f"{kind.words} were not tried before a CUDA graph was captured"
        late = f"{kind.words} were not tried before this rank was ready"
        _note(kind, late if _ended else tried(kind, compare))
    return _outcomes[kind]


def overrule(kind: Kind, reason: str) -> None:
    """Let calls of this kind take the streaming form, whatever its trial came to here."""
    _note(kind, reason)


def _note(kind: Kind, reason: str | None) -> None:
    _outcomes[kind] = reason
    if reason is not None:
        warnings.warn(f"{reason}; the streaming form is taken, which is slower", RuntimeWarning, stacklevel=3)


def found_right() -> list[str]:
    """The kinds whose trials came out right."""
    return sorted({kind.words for kind, reason in [*_outcomes.items()] if reason is None})


def end_trials(also_right: Collection[str] | None = None) -> list[str]:
    """Let calls of kinds that were not tried so far take the streaming form; what the trials came to, in words.

    Where `also_right` says what other ranks `found_right`, kinds that are not among it stream too.
    """
    global _ended
    _ended = True
    for kind, reason in [*_outcomes.items()]:
        if reason is None and also_right is not None and kind.words not in also_right:
            overrule(kind, f"{kind.words} did not come out right on all ranks")
    return [reason or kind.words for kind, reason in [*_outcomes.items()]]


def tried(kind: Kind, compare: Compare) -> str | None:
    """Compare the results of the kernels with exact ones; why they are not right, or None."""
    try:
        # In a thread of its own, without the caller's autocast, hooks and modes: where activations are computed again,
        # those would keep what the trial saves and computes among the caller's own.
        with ThreadPoolExecutor(1) as thread:
            errors = thread.submit(_errors, kind.device, compare).result()
    except Exception as error:  # of a compiler, a driver or too little memory: the streaming form goes on
        said = str(error).partition("\n")[0][:300]
        return f"{kind.words} failed on this GPU ({type(error).__name__}: {said})"
    # What is no number is not right.
    wrong = [f"{name} {error:.2g}" for name, error in errors.items() if not error <= ACCEPTED]
    return f"{kind.words} did not come out right on this GPU (relative errors: {', '.join(wrong)})" if wrong else None


def _errors(device: torch.device, compare: Compare) -> dict[str, float]:
    """The distance of each result of the kernels from the exact one."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device)
    with _in_turn():
        got, want = compare()
        return {name: _error(got[name], exact) for name, exact in want.items()}


def results_of(
    run: Callable[[Results], Results],
    given: Results,
    *,
    gradients: bool,
    dtype: torch.dtype | None = None,
    squares: bool = False,
) -> Results:
    """The results of `run` on copies of these tensors, and where asked for all gradients, by name.

    With `dtype` of tensors in that type. Gradients are those of each result by itself under random weights: beside sums
    over all tokens, what comes back from outputs would not be seen. With `squares`, of the squares of all together.
    """
    leaves = {name: t.detach().to(dtype or t.dtype, copy=True).requires_grad_(gradients) for name, t in given.items()}
    with torch.set_grad_enabled(gradients):
        made = run(leaves)
        if not gradients:
            losses = {}
        elif squares:
            losses = {"": torch.stack([t.float().square().sum() for t in made.values()]).sum()}
        else:
            generator = torch.Generator(device="cpu").manual_seed(1)
            weights = {of: torch.randn(t.shape, generator=generator, device="cpu") for of, t in made.items()}
            losses = {f" by {of}": (t.float() * send(weights[of], t.device)).sum() for of, t in made.items()}
    results = {name: t.detach() for name, t in made.items()}
    for by, loss in losses.items():
        if loss.requires_grad:
            found = torch.autograd.grad(
                loss, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            results |= {f"gradient of {name}{by}": grad for name, grad in zip(leaves, found, strict=True)}
    return results


def name_of(dtype: torch.dtype) -> str:
    """A type's name without the library's."""
    return str(dtype).removeprefix("torch.")


def way_of(gradients: bool) -> str:
    """The passes that a call needs, in words."""
    return "forward and backward" if gradients else "forward"


@contextmanager
def _in_turn() -> Iterator[None]:
    """One process of this host after the other: the first measures tiles, and the others read the same ones of it."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
    with ExitStack() as held:
        with suppress(OSError):  # a folder that cannot be written: each measures for itself
            folder.mkdir(parents=True, exist_ok=True)
            opened = held.enter_context((folder / "dist-attn-trials").open("w"))
            began, said = time.monotonic(), False
            while (waited := time.monotonic() - began) < WAIT_S:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if waited > TOLD_S and not said:
                        words = f"waiting up to {WAIT_S:g} s for another process that tries kernels ({opened.name})"
                        warnings.warn(words, RuntimeWarning, stacklevel=2)
                        said = True
                    time.sleep(0.1)
        yield


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the result, or a quarter of the worst token's where that is more."""
    width = exact.shape[-1] if exact.dim() == 4 else 1
    difference = (got.float() - exact.float()).reshape(-1, width).norm(dim=1)
    size = exact.float().reshape(-1, width).norm(dim=1)
    usual = size.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    whole, worst = difference.square().mean().sqrt() / usual, (difference / size.clamp_min(usual)).max()
    return float(torch.maximum(whole, worst / 4))

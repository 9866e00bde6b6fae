"""Trials of flash-linear-attention's kernels on this GPU: one of each kind of call in a process.

A trial first runs the kernels on the call itself, where there is memory for it, which is when Triton measures tiles for
its sizes. It keeps them in TRITON_CACHE_DIR, so that this is quick the next time, and all ranks of a host have the
same. Then outputs, the state after and, where they are asked for, all gradients are compared with the streaming form in
float32, on a few chunks of random numbers. A rank of the service runs its trials before it is ready and ends them: no
request waits for one. Ranks that compute one text tell each other what theirs came to (`sharded.trials`).

Shape letters: B batch, H heads, L tokens, K key size, V values.
"""

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from dist_attn.ops.affine.call import AffineCall, Inputs
from dist_attn.ops.affine.state import AffineState
from dist_attn.ops.affine.streaming import stream_recurrence
from dist_attn.ops.device import send, without_autocast
from dist_attn.ops.fla_known import surroundings_of
from dist_attn.ops.gpu_record import FlaOperation
from dist_attn.ops.watch import watching

__all__ = ["Kind", "end_trials", "found_right", "overrule", "why_not_right_here"]

TOKENS, STARTS, CLOSED = 170, (30, 100), 90  # two chunks of 64 and a part; where documents start; a closed gate
TOLD_S = 10.0  # of waiting for them without a word
WAIT_S = 600.0  # for trials of other processes of this host at most
ACCEPTED = 0.03  # of `_error`: some roundings of bfloat16; a token that is all wrong comes to a multiple of it

Results = dict[str, torch.Tensor]
Form = Callable[[AffineCall], tuple[torch.Tensor, AffineState]]


@dataclass(frozen=True)
class Kind:
    """Calls for which kernels are compiled and their tiles measured once, whatever the number of tokens.

    sizes       B as 1 or more, H, K, V.
    packed      several documents.
    """

    device: torch.device
    operation: FlaOperation
    dtype: torch.dtype
    sizes: tuple[int, int, int, int]
    packed: bool
    gradients: bool

    @property
    def words(self) -> str:
        """The kind as people are told of it."""
        _, heads, size, values = self.sizes
        way, packed = "forward and backward" if self.gradients else "forward", ", packed" * self.packed
        return f"{self.operation} {str(self.dtype).removeprefix('torch.')} {way}, {heads} x {size} x {values}{packed}"

    def call(self) -> AffineCall:
        """A call of this kind, of the same random numbers each time."""
        generator = torch.Generator(device="cpu").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return send(torch.randn(shape, generator=generator, device="cpu"), self.device)

        batch, heads, size, values = self.sizes
        per_token, kind = (batch, heads, TOKENS), self.operation
        vector = kind not in ("fla_simple_gla", "fla_gated_delta")
        decay = F.logsigmoid(3 + normal(*per_token, size if vector else 1))
        decay[:, :, CLOSED] = -torch.inf
        q, k, b = (F.normalize(normal(*per_token, size), dim=-1).to(self.dtype) for _ in range(3))
        beta = normal(*per_token).sigmoid()
        return AffineCall(
            q,
            k,
            normal(*per_token, values).to(self.dtype),
            decay,
            (-b * beta[..., None].to(self.dtype), b) if kind == "fla_dplr" else None,
            beta if kind in ("fla_gated_delta", "fla_kda") else None,
            normal(heads, size) if kind == "fla_rwkv6" else None,
            "before" if kind == "fla_rwkv6" else "after",
            AffineState(normal(batch, heads, size, values)),
            STARTS if self.packed else (),
        )


_outcomes: dict[Kind, str | None] = {}
_ended = False


def why_not_right_here(call: AffineCall, kind: Kind) -> str | None:
    """The reason why the kernels did not come out right in the trial of this kind, or None; it runs now if none did."""
    if kind not in _outcomes:
        late = f"flash-linear-attention's {kind.words} were not tried before this rank was ready"
        _note(kind, late if _ended else tried(call, kind))
    return _outcomes[kind]


def overrule(kind: Kind, reason: str) -> None:
    """Let calls of this kind take the streaming form, whatever its trial came to here."""
    _note(kind, reason)


def _note(kind: Kind, reason: str | None) -> None:
    _outcomes[kind] = reason
    if reason is not None:
        warnings.warn(f"{reason}; the streaming form is taken, which is slower", RuntimeWarning, stacklevel=3)


def found_right() -> list[str]:
    """The kinds whose trials came out right, with the versions that they ran with."""
    return sorted({_named(kind) for kind, reason in _outcomes.items() if reason is None})


def _named(kind: Kind) -> str:
    on = surroundings_of(kind.device)
    return f"{kind.words} (fla {on.fla}, Triton {on.triton})"


def end_trials(also_right: Collection[str] | None = None) -> list[str]:
    """Let calls of kinds that were not tried so far take the streaming form; what the trials came to, in words.

    Where `also_right` says what other ranks `found_right`, kinds that are not among it stream too.
    """
    global _ended
    _ended = True
    for kind, reason in [*_outcomes.items()]:
        if reason is None and also_right is not None and _named(kind) not in also_right:
            overrule(kind, f"flash-linear-attention's {_named(kind)} did not come out right on all ranks")
    return [reason or f"flash-linear-attention's for {kind.words}" for kind, reason in _outcomes.items()]


def tried(call: AffineCall, kind: Kind) -> str | None:
    """Measure tiles on the call and compare results on a small one; why they are not right, or None."""
    from dist_attn.ops.affine.fla import fla_recurrence  # a machine without a GPU need not have fla

    whose = f"flash-linear-attention's {kind.words}"
    try:
        small = kind.call()
        with without_autocast(kind.device), watching(None):
            with _in_turn():
                _measure(call, small, fla_recurrence, kind)
            got, want = _results(small, fla_recurrence, kind), _results(_widened(small), stream_recurrence, kind)
            errors = {name: _error(got[name], exact) for name, exact in want.items()}
    except Exception as error:  # of a compiler, a driver or too little memory: the streaming form goes on
        return f"{whose} failed on this GPU ({type(error).__name__}: {str(error).partition(chr(10))[0][:300]})"
    # What is no number is not right.
    wrong = [f"{name} {error:.2g}" for name, error in errors.items() if not error <= ACCEPTED]
    return f"{whose} did not come out right on this GPU (relative errors: {', '.join(wrong)})" if wrong else None


def _measure(call: AffineCall, small: AffineCall, form: Form, kind: Kind) -> None:
    """Run the kernels on the call, or on the small one where the call is shorter or finds no memory beside a step."""
    if call.tokens >= TOKENS:
        with suppress(torch.cuda.OutOfMemoryError):
            _results(call, form, kind)
            return
    _results(small, form, kind)


@contextmanager
def _in_turn() -> Iterator[None]:
    """One process of this host after the other: the first measures tiles, and the others read the same ones of it."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
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


def _results(call: AffineCall, form: Form, kind: Kind) -> Results:
    """Outputs, the state after and, where the kind asks for them, the gradients of all tensors, by name."""
    given = call.inputs(None if call.state is None else call.state.s_BHKV)
    leaves = Inputs(*(None if t is None else t.detach().requires_grad_(kind.gradients) for t in given))
    with torch.set_grad_enabled(kind.gradients):
        out, after = form(replace(AffineCall.of(leaves, call.read, call.documents), products=kind.dtype))
    results = {"outputs": out.detach(), "state": after.s_BHKV.detach()}
    if kind.gradients:
        there = {name: t for name, t in zip(Inputs._fields, leaves, strict=True) if t is not None}
        # Of squares, so that the numbers that come back differ from token to token.
        loss = out.float().square().sum() + after.s_BHKV.square().sum()
        found = torch.autograd.grad(loss, list(there.values()), allow_unused=True, materialize_grads=True)
        results |= {f"gradient of {name}": t for name, t in zip(there, found, strict=True)}
    return results


def _widened(call: AffineCall) -> AffineCall:
    return call.with_sequence(tuple(None if t is None else t.float() for t in call.sequence))


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the result, or a quarter of the worst token's where that is more."""
    width = exact.shape[-1] if exact.dim() == 4 else 1
    difference = (got.float() - exact.float()).reshape(-1, width).norm(dim=1)
    size = exact.float().reshape(-1, width).norm(dim=1)
    usual = size.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    whole, worst = difference.square().mean().sqrt() / usual, (difference / size.clamp_min(usual)).max()
    return float(torch.maximum(whole, worst / 4))

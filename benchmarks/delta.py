"""The gated delta rule: against transformers, the arithmetic limit, its own gradients, lengths, and a second rank."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cases import delta_inputs
from benchmarks.flat_memory import held
from benchmarks.measured import Found, Table
from benchmarks.peers import absent, delta_rule
from benchmarks.rank_passes import Pass, run_passes
from benchmarks.timing import Roofline, Times, interleaved, rate_works
from benchmarks.two_ranks import speedup
from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import gated_delta_rule
from dist_attn.sharded import ShardedSequenceOps

__all__ = ["NAME", "QUESTION", "TESTS", "carry_over_formula", "delta_flops", "measure"]

NAME = "delta"
QUESTION = (
    "How fast is the gated delta rule, and what does it hold and send? B1 H8, keys and values of 128, float32, one "
    "thread; memory with one head, carries with one head of 16."
)
TESTS = ("tests/ops/test_affine.py", "tests/ops/test_affine_native.py", "tests/sharded/test_affine.py")
HEADS, SIZE, CHUNK = 8, 128, 64
LENGTH, ROUNDS, RANKS_LENGTH, RANKS_ROUNDS = 2_048, 15, 65_536, 7
LENGTHS = (8_192, 32_768, 131_072, 524_288, 1_048_576)
CARRY_LENGTHS, CARRY_SIZE = (1_024, 16_384, 262_144), 16
WEIGHTS = {"scalar": 1, "diagonal": CARRY_SIZE, "matrix": CARRY_SIZE * CARRY_SIZE}
OURS, PEER, BOTH = "ours", "transformers", "ours, forward and backward"

NOTES = (
    "backward / forward: forward and backward together, less a forward pass without gradients, over the latter.",
    "Two ranks are processes with a thread each over gloo; the slower one counts, against the first one alone.",
    "Carries are those of a scan by pairs; ranks that take turns send the state without its transition.",
    "Bytes are of one head, counted at every operation of this thread; what a kernel uses inside one is not seen.",
)


def delta_flops(length: int) -> float:
    """Operations of the form in chunks of 64, without gradients, at the reference shape.

    For a token and head: its row of K K^T and of Q K^T, of the triangular system's solution for values and keys, and of
    the outputs' product with new values; its keys' and query's product with the state, and what it adds to the state.
    """
    products = CHUNK * (2 * SIZE + 2 * SIZE + SIZE) + 3 * SIZE * SIZE
    return 2.0 * length * HEADS * products


def measure(smoke: bool) -> Found:
    """All of it; torch has one thread meanwhile, and the longest backward pass needs about 6 GB."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(smoke)
    finally:
        torch.set_num_threads(threads)


def _measure(smoke: bool) -> Found:
    length, ranks_length = (128, 256) if smoke else (LENGTH, RANKS_LENGTH)
    lengths, carry_lengths = ((1_024, 2_048), (8, 32)) if smoke else (LENGTHS, CARRY_LENGTHS)
    times = _times(length, 1 if smoke else ROUNDS)
    roof, ours = Roofline.of(times), times[OURS].median
    # q, k, v and the outputs, once each.
    least = delta_flops(length), 4.0 * HEADS * SIZE * length * 4
    ratios = {f"{PEER} / ours": times[PEER].median / ours} if PEER in times else {}
    ratios["ours / limit"] = ours / roof.least_seconds(*least)
    ratios["backward / forward"] = times[BOTH].median / ours - 1
    # A gradient without strides that kernels would have to copy away.
    memory = held(_ours, partial(delta_inputs, heads=1, size=SIZE), torch.ones_like, lengths)
    passes = [Pass(ranks_length, gradients=gradients, delta=True) for gradients in (False, True)]
    forward, both = map(speedup, run_passes(passes, 2, 1 if smoke else RANKS_ROUNDS))
    together = {"2 ranks, forward": forward, "2 ranks, forward and backward": both}
    carried = {kind: [carry_over_formula(kind, n) for n in carry_lengths] for kind in WEIGHTS}
    ratios |= {**memory.ratios, **together}
    # Of carries whichever is farthest from 1.
    ratios |= {f"carry / formula, {k}": max(of, key=lambda x: abs(x - 1)) for k, of in carried.items()}
    tables = (
        Table(
            f"{length:,} tokens, medians of rounds taken in turns",
            ("work", "time", "spread"),
            tuple((name, f"{1e3 * one.median:,.1f} ms", f"{one.spread:.0%}") for name, one in times.items()),
        ),
        *memory.tables,
        Table(
            f"Two ranks against one, {ranks_length:,} tokens",
            ("pass", "faster"),
            tuple((name, f"{value:.2f}x") for name, value in together.items()),
        ),
        Table(
            "Carry bytes over 4 B H (|A| + K V)",
            ("transition", *(f"{n:,} tokens a rank" for n in carry_lengths)),
            tuple((kind, *(f"{value:g}x" for value in of)) for kind, of in carried.items()),
        ),
    )
    return Found(
        tables,
        {name: round(value, 4) for name, value in ratios.items()},
        {**memory.numbers, **{f"{name}, seconds": one.median for name, one in times.items()}},
        memory.panels,
        (roof.line(f"forward, {length:,} tokens", *least, ours), *NOTES),
        absent(PEER),
    )


def _times(length: int, rounds: int) -> dict[str, Times]:
    inputs = delta_inputs(length, HEADS, SIZE)
    leaves = [t.clone().requires_grad_() for t in inputs]
    weight = torch.randn(inputs[2].shape)
    works: dict[str, Callable[[], object]] = {OURS: torch.no_grad()(lambda: _ours(*inputs))}
    if not absent(PEER):
        works[PEER] = torch.no_grad()(lambda: delta_rule(*inputs))
    works[BOTH] = lambda: torch.autograd.grad(_ours(*leaves), leaves, weight)
    return interleaved({**works, **rate_works()}, rounds)


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return gated_delta_rule(q, k, v, beta_BHL=beta, log_decay_BHLK=decay)[0]


def carry_over_formula(kind: str, length: int) -> float:
    """The most bytes that one of two ranks sends, of `length` tokens each, over 4 B H (|A| + K V)."""
    sent = run_simulated(partial(_carry_bytes, kind=kind, length=length), 2)
    return max(sent) / (4 * (WEIGHTS[kind] + CARRY_SIZE * CARRY_SIZE))


def _carry_bytes(comm: Communicator, kind: str, length: int) -> int:
    ops = ShardedSequenceOps(comm, SequenceLayout.even(2 * length, 2), exchange="pair")
    q, k, v, decay, beta = delta_inputs(length, 1, CARRY_SIZE)
    comm.traffic.clear()
    with torch.no_grad():
        if kind == "matrix":
            ops.gated_delta_rule(q, k, v, beta_BHL=beta, log_decay_BHLK=decay)
        else:
            log_decay = decay if kind == "scalar" else decay.expand_as(k)
            ops.affine_recurrence(q, k, v, log_decay_BHLK=log_decay)
    return comm.traffic.bytes_sent

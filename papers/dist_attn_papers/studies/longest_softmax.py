"""The longest sequence whose exact attention fits into 1 GB of tensors per rank: what heads, ranks and tiles each buy.

A Unified View of Long-Sequence Models reports 40 x the length of a plain implementation for four devices that take the
heads one by one. One device that takes the heads one by one is the baseline it leaves out; kernels that never hold the
scores are another.
"""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import targets
from benchmarks.memory import TrackedMemory
from benchmarks.setting import Setting, look_around
from benchmarks.targets import judge
from dist_attn.comm import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.feature_maps import Gaussian
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState, linear_attention, softmax_attention
from dist_attn.ops.softmax_attention import softmax_attention_naive
from dist_attn.sharded import ShardedSequenceOps, SoftmaxExchange

__all__ = [
    "HEADS",
    "RANKS",
    "SIZE",
    "TESTS",
    "LongestSoftmax",
    "head_by_head",
    "longest_ratios",
    "longest_within",
    "measure",
]

NAME = "longest-softmax"
QUESTION = "How long a sequence fits into 1 GB of tensors per rank, by form of attention?"
TESTS = ("tests/sharded/test_softmax_across_ranks.py", "tests/ops/test_softmax_attention.py")
HEADS, SIZE, NUM_RANDOM, RANKS = 12, 64, 64, 4
BUDGET_BYTES = 10**9
STREAMED_BLOCK = 2048
STREAMED_TIMES_PLAIN = 10_000


@dataclass(frozen=True)
class Form:
    """One way to attend. `attend(comm, length)` runs it and gives the peak of tracked bytes on this rank.

    Bytes are a polynomial of the length of this `degree`; it is found at `lengths` and checked at `check`. Where the
    longest sequence can be attended to in reasonable time, it is (`confirm`).
    """

    name: str
    ranks: int
    attend: Callable[[Communicator, int], int]
    degree: int
    lengths: tuple[int, ...]
    check: int
    confirm: bool


@dataclass(frozen=True)
class Row:
    """One form. Units: bytes; tokens. `longest` is None where the bytes do not grow with the length."""

    form: str
    ranks: int
    coefficients: tuple[float, ...]
    measured: dict[int, int]
    check_length: int
    check_over_formula: float
    longest: int | None
    times_plain: float | None
    bytes_at_longest: int | None


@dataclass(frozen=True)
class LongestSoftmax:
    """All forms, measured."""

    setting: Setting
    rows: tuple[Row, ...]
    case: str = NAME

    def as_json(self) -> str:
        """The result for machines."""
        shape = {"heads": HEADS, "head_size": SIZE, "dtype": "float32", "causal": True, "budget_bytes": BUDGET_BYTES}
        ratios = longest_ratios(asdict(self)["rows"])
        judged = {"ratios": ratios, "targets": targets.as_json(judge("longest-softmax", ratios))}
        values = {"object": "benchmark", **shape, **asdict(self), **judged}
        return json.dumps(values, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        lines = [
            "# longest-softmax",
            "",
            f"The longest sequence within {BUDGET_BYTES / 1e9:g} GB of tracked tensors per rank: batch 1, {HEADS} "
            f"heads of {SIZE}, float32, causal, forward, q, k, v and the outputs included.",
            "",
            self.setting.sentence(),
            "Bytes were counted at the lengths given in the JSON; the polynomial through them was checked at another "
            "length (measured / formula) and solved for the budget. Rows with bytes at the longest length were run "
            "there; the others would take long and are extrapolated by the checked formula. Ranks are processes over "
            "gloo, the lower of two runs each; what a back end or a kernel uses inside one call is not seen. Streamed "
            f"attention has no longest sequence: named is one that was run, {STREAMED_TIMES_PLAIN:,} times the plain "
            "form's longest, the same block of tokens again and again.",
            "",
            "| form | ranks | bytes per token | longest | times plain | measured / formula | bytes at the longest |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            longest = "any" if row.longest is None else f"{row.longest:,}"
            times = "" if row.times_plain is None else f"{row.times_plain:,.1f}"
            ran = "" if row.bytes_at_longest is None else f"{row.bytes_at_longest:,}"
            cells = [row.form, str(row.ranks), _growth(row.coefficients), longest, times]
            lines.append(f"| {' | '.join([*cells, f'{row.check_over_formula:.4f}', ran])} |")
        judged = targets.as_markdown(judge("longest-softmax", longest_ratios(asdict(self)["rows"])))
        return "\n".join(lines) + f"\n\n{judged}"

    def draw(self, path: Path) -> None:
        """Bytes over length for every form, and where the budget ends them."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        axes = figure.add_subplot()
        lengths = np.geomspace(256, 4e6, 200)
        for row in self.rows:
            (line,) = axes.loglog(
                lengths, np.polyval(row.coefficients[::-1], lengths), label=f"{row.form}, {row.ranks}"
            )
            if row.longest is not None:
                axes.plot(row.longest, BUDGET_BYTES, "o", color=line.get_color())
        axes.axhline(BUDGET_BYTES, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="tokens", ylabel="bytes of tensors per rank, at the peak", ylim=(1e5, 1e11))
        axes.set_title(f"Causal attention, {HEADS} heads of {SIZE}, float32; form and ranks")
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=110)


def head_by_head(q_BHLK: torch.Tensor, k_BHLK: torch.Tensor, v_BHLV: torch.Tensor) -> torch.Tensor:
    """Causal attention with the scores of one head at a time; outputs are written into one tensor."""
    out = torch.empty_like(q_BHLK)
    for head in range(q_BHLK.shape[1]):
        one = (t[:, head : head + 1] for t in (q_BHLK, k_BHLK, v_BHLV))
        out[:, head] = softmax_attention_naive(*one, causal=True)[:, 0]
    return out


def measure(smoke: bool) -> LongestSoftmax:
    """Run every form at its lengths; `smoke` looks at the smallest ones and confirms nothing."""
    setting = look_around()
    forms = _forms(smoke)
    peaks = _peaks([(number, n) for number, form in enumerate(forms) for n in (*form.lengths, form.check)], smoke)
    rows = [
        _row(form, {n: peaks[number, n] for n in form.lengths}, peaks[number, form.check])
        for number, form in enumerate(forms)
    ]
    plain = rows[0].longest or 1
    rows = [row if row.longest is None else replace(row, times_plain=round(row.longest / plain, 2)) for row in rows]
    again = [(i, row.longest) for i, row in enumerate(rows) if forms[i].confirm and row.longest and not smoke]
    for (number, _), peak in _peaks(again, smoke).items():
        rows[number] = replace(rows[number], bytes_at_longest=peak)
    if not smoke:
        length = STREAMED_TIMES_PLAIN * plain
        with LocalCommunicator() as comm:
            peak = _streamed(comm, length)
        rows[-1] = replace(rows[-1], longest=length, times_plain=float(STREAMED_TIMES_PLAIN), bytes_at_longest=peak)
    return LongestSoftmax(setting, tuple(rows))


def longest_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Lengths over that of the plain form: the best exact one over ranks, and linear attention by blocks."""
    found = {(row["form"], row["ranks"]): row["times_plain"] for row in rows}
    exact = [times for form in ("head reshuffle", "ring") if (times := found.get((form, RANKS)))]
    streamed = found.get(("linear attention, streamed", 1))
    return ({"best exact / plain": max(exact)} if exact else {}) | ({"linear / plain": streamed} if streamed else {})


def _forms(smoke: bool) -> list[Form]:
    """Quadratic forms are looked at where they are cheap, the others where tiles and states are no longer the peak."""
    short, kernel, ring, linear = (
        ((256, 512, 1024), 1536),
        ((4096, 8192), 6144),
        ((10_240, 16_384), 12_288),
        ((32_768, 65_536), 49_152),
    )
    if smoke:
        short, kernel = ((32, 64, 128), 96), ((256, 512), 384)
        ring = linear = kernel
    return [
        Form("all heads at once", 1, _all_heads, 2, *short, True),
        Form("one head after the other", 1, _head_by_head, 2, *short, True),
        Form("fused kernel", 1, _fused, 1, *kernel, False),
        Form("head reshuffle", RANKS, partial(_across, "reshuffle"), 1, *kernel, False),
        Form("ring", RANKS, partial(_across, "ring"), 1, *ring, False),
        Form("linear attention", 1, _linear, 1, *linear, True),
        Form("linear attention", RANKS, _linear_across, 1, *linear, True),
        Form("linear attention, streamed", 1, _streamed, 0, linear[0][:1], linear[0][1], False),
    ]


def _row(form: Form, measured: dict[int, int], checked: int) -> Row:
    coefficients = np.polyfit(list(measured), np.array(list(measured.values()), dtype=np.float64), form.degree)
    return Row(
        form=form.name,
        ranks=form.ranks,
        coefficients=tuple(float(c) for c in coefficients[::-1]),
        measured=measured,
        check_length=form.check,
        check_over_formula=round(checked / float(np.polyval(coefficients, form.check)), 5),
        longest=longest_within(coefficients, BUDGET_BYTES) if form.degree else None,
        times_plain=None,
        bytes_at_longest=None,
    )


def longest_within(coefficients: np.ndarray, budget: float) -> int:
    """The largest whole length whose bytes, a polynomial of it, do not exceed the budget."""
    falling = coefficients.copy()
    falling[-1] -= budget
    return int(max(root.real for root in np.roots(falling) if abs(root.imag) < 1e-6))


def _peaks(jobs: Sequence[tuple[int, int]], smoke: bool) -> dict[tuple[int, int], int]:
    """The peak of each (form, length), on the rank that holds most; ranks are processes that live for all jobs."""
    forms, found = _forms(smoke), {}
    for number, length in jobs:
        if forms[number].ranks == 1:
            with LocalCommunicator() as comm:
                found[number, length] = forms[number].attend(comm, length)
    across = [job for job in jobs if forms[job[0]].ranks > 1]
    if across:
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder, context.Pool(RANKS) as pool:
            store = (Path(folder) / "store").as_uri()
            of_ranks = pool.starmap(_rank_main, [(r, store, across, smoke) for r in range(RANKS)], chunksize=1)
        found |= {job: max(peaks) for job, *peaks in zip(across, *of_ranks, strict=True)}
    return found


def _rank_main(rank: int, store: str, jobs: Sequence[tuple[int, int]], smoke: bool) -> list[int]:
    """The peaks of all jobs on one of the ranks."""
    torch.set_num_threads(1)
    forms, cpu = _forms(smoke), torch.device("cpu")
    with TorchDistCommunicator.connect(
        "gloo", timeout_s=600.0, device=cpu, meeting=store, rank=rank, size=RANKS
    ) as comm:
        # The lower of two: gloo's own thread may let go of what was sent a moment after it is no longer needed.
        return [min(forms[number].attend(comm, length) for _ in range(2)) for number, length in jobs]


def _all_heads(_: Communicator, length: int) -> int:
    return _tracked(length, lambda q, k, v: softmax_attention_naive(q, k, v, causal=True))


def _head_by_head(_: Communicator, length: int) -> int:
    return _tracked(length, head_by_head)


def _fused(_: Communicator, length: int) -> int:
    return _tracked(length, lambda q, k, v: softmax_attention(q, k, v, causal=True))


def _across(exchange: SoftmaxExchange, comm: Communicator, length: int) -> int:
    layout = SequenceLayout.even(length, comm.size)
    ops = ShardedSequenceOps(comm, layout, softmax=exchange)
    return _tracked(layout.lengths[comm.rank], lambda q, k, v: ops.softmax_attention(q, k, v, causal=True))


def _linear(_: Communicator, length: int) -> int:
    return _tracked(length, lambda q, k, v: linear_attention(q, k, v, feature_map=_feature_map()))


def _linear_across(comm: Communicator, length: int) -> int:
    layout = SequenceLayout.even(length, comm.size)
    ops = ShardedSequenceOps(comm, layout)
    return _tracked(
        layout.lengths[comm.rank], lambda q, k, v: ops.linear_attention(q, k, v, feature_map=_feature_map())
    )


def _streamed(_: Communicator, length: int) -> int:
    """Blocks come and go; what stays is the state."""
    state: LinearState | None = None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        nonlocal state
        _, state = linear_attention(q, k, v, feature_map=_feature_map(), state=state)

    whole, rest = divmod(length, STREAMED_BLOCK)
    with torch.inference_mode(), TrackedMemory() as tracked:
        qkv = _inputs(min(length, STREAMED_BLOCK))
        for tokens in (*repeat(STREAMED_BLOCK, whole), *([rest] if rest else [])):
            attend(*(t[:, :, :tokens] for t in qkv))
    return int(tracked.peak)


def _tracked(length: int, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> int:
    """The peak of tracked bytes while inputs are made and attended to."""
    with torch.inference_mode(), TrackedMemory() as tracked:
        attend(*_inputs(length))
    return int(tracked.peak)


def _inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shape = (1, HEADS, length, SIZE)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def _feature_map() -> Gaussian:
    return Gaussian(torch.randn(HEADS, NUM_RANDOM, SIZE, generator=torch.Generator().manual_seed(0)), unit_norm=True)


def _growth(coefficients: tuple[float, ...]) -> str:
    """The polynomial without its constant, in bytes."""
    names = ["", " L", " L²"]
    terms = [f"{c:,.0f}{name}" for c, name in zip(coefficients, names, strict=False) if name and abs(c) >= 0.5]
    return " + ".join(terms[::-1]) or "none"

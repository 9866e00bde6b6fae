"""What must be fast, and by how much: every target with the benchmark that measures it and the ratio that it is about.

A ratio is taken side by side in one run. A benchmark gives its ratios names; a target picks one of them by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["TARGETS", "Target", "Verdict", "as_json", "as_markdown", "benchmark_of", "judge"]

Sense = Literal["at least", "at most", "equal to"]


@dataclass(frozen=True)
class Target:
    """One row: what is compared, the bound, and where its number comes from.

    `benchmark` and `ratio` are names: of what `dist-attn bench` runs, and of the number in its result, which may name
    a device behind its benchmark: "gpu on NVIDIA H200". `form` is how the number is written; `form.format(bound)` must
    say the bound exactly.
    """

    benchmark: str
    ratio: str
    words: str
    sense: Sense
    bound: float
    form: str = "{:.2f}x"

    def met_by(self, reached: float) -> bool:
        """Whether the number is on the right side of the bound, or on it."""
        if self.sense == "equal to":
            return reached == self.bound
        return reached >= self.bound if self.sense == "at least" else reached <= self.bound

    @property
    def needed(self) -> str:
        """The bound in words."""
        return f"{self.sense} {self.form.format(self.bound)}"


@dataclass(frozen=True)
class Verdict:
    """A target and what was reached; None: this run has no such number."""

    target: Target
    reached: float | None

    @property
    def met(self) -> bool | None:
        """Yes, no, or not measured."""
        return None if self.reached is None else self.target.met_by(self.reached)

    @property
    def said(self) -> tuple[str, str]:
        """What was reached, and yes or no."""
        if self.reached is None:
            return "not measured", ""
        return self.target.form.format(self.reached), "yes" if self.met else "no"


def benchmark_of(case: str) -> str:
    """The benchmark of a result, without the device that its name may end in."""
    return case.partition(" on ")[0]


def judge(case: str, ratios: Mapping[str, float]) -> tuple[Verdict, ...]:
    """Every target of a result's benchmark beside what it found."""
    return tuple(Verdict(t, ratios.get(t.ratio)) for t in TARGETS if t.benchmark == benchmark_of(case))


def as_markdown(verdicts: tuple[Verdict, ...]) -> str:
    """A table of targets; empty where there are none."""
    if not verdicts:
        return ""
    rows = [f"| {one.target.words} | {one.target.needed} | {' | '.join(one.said)} |" for one in verdicts]
    return "\n".join(["| target | needed | reached | met |", "|---|---|---|---|", *rows]) + "\n"


def as_json(verdicts: tuple[Verdict, ...]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [
        {
            "target": verdict.target.words,
            "ratio": verdict.target.ratio,
            "sense": verdict.target.sense,
            "bound": verdict.target.bound,
            "reached": verdict.reached,
            "met": verdict.met,
        }
        for verdict in verdicts
    ]


_MIB, _PERCENT, _WHOLE, _COUNT, _TENTH, _THIRD = "{:.0f} MiB", "{:.1%}", "{:.0%}", "{:,.0f}x", "{:.1f}x", "{:.3f}x"

TARGETS = (
    Target("forward", "sdpa / ours at 512", "forward against SDPA, 512 tokens", "at least", 1.0),
    Target("forward", "sdpa / ours at 2048", "forward against SDPA, 2,048 tokens", "at least", 1.0),
    Target("forward", "sdpa / ours at 8192", "forward against SDPA, 8,192 tokens", "at least", 10.0),
    Target("forward", "sdpa / ours at 32768", "forward against SDPA, 32,768 tokens", "at least", 40.0),
    Target("forward", "ours / limit at 32768", "forward against the arithmetic limit", "at most", 1.5),
    Target("backward", "sdpa / ours at 8192", "forward and backward against SDPA, 8,192 tokens", "at least", 8.0),
    Target("step", "transformers / ours at 1", "decode step of one text against modules, bfloat16", "at least", 2.2),
    Target("encoder", "transformers / ours at 4096", "encoder against BERT of its size, bfloat16", "at least", 1.3),
    Target("backward", "backward / forward at 8192", "backward against forward", "at most", 3.0),
    Target("flat-memory", "forward MiB, most", "forward memory, 8,192 to 1,048,576 tokens", "at most", 64.0, _MIB),
    Target("flat-memory", "backward MiB, most", "backward memory, 8,192 to 1,048,576 tokens", "at most", 128.0, _MIB),
    Target("flat-memory", "forward, longest / shortest", "forward memory, longest / least", "at most", 1.01, _THIRD),
    Target("flat-memory", "backward, longest / shortest", "backward memory, longest / least", "at most", 1.01, _THIRD),
    Target("delta", "transformers / ours", "gated delta rule against transformers, one thread", "at least", 10.0),
    Target("delta", "ours / limit", "gated delta rule against the arithmetic limit", "at most", 1.5),
    Target("delta", "backward / forward", "its backward against its forward", "at most", 3.0),
    Target("delta", "forward, longest / shortest", "its forward memory, longest / least", "at most", 1.01, _THIRD),
    Target("delta", "backward, longest / shortest", "its backward memory, longest / least", "at most", 1.01, _THIRD),
    Target("delta", "2 ranks, forward", "its forward, 2 ranks against 1, a thread each", "at least", 1.7),
    Target("delta", "2 ranks, forward and backward", "its forward and backward, 2 ranks against 1, a thread each",
           "at least", 1.7),
    Target("delta", "carry / formula, scalar", "carry bytes of a scalar transition", "equal to", 1.0, "{:g}x"),
    Target("delta", "carry / formula, diagonal", "carry bytes of a diagonal transition", "equal to", 1.0, "{:g}x"),
    Target("delta", "carry / formula, matrix", "carry bytes of a matrix transition", "equal to", 1.0, "{:g}x"),
    Target("two-ranks", "ungated forward", "2 ranks against 1, a thread each, forward, ungated", "at least", 1.6),
    Target("two-ranks", "gated forward", "2 ranks against 1, forward, decaying gates", "at least", 1.9),
    Target("two-ranks", "ungated forward and backward", "2 ranks against 1, forward and backward", "at least", 1.6),
    Target("two-ranks", "carry bytes / formula", "carry bytes of a rank against the formula", "equal to", 1.0, "{:g}x"),
    Target("two-ranks", "carry bytes, longest / shortest", "carry bytes against the length",
           "equal to", 1.0, "{:g}x"),
    Target("two-ranks", "exposed share", "exposed communication at 16,384 tokens a rank", "at most", 0.05, _PERCENT),
    Target("decode", "batch 16, cached / ours, eager float32",
           "decoding, batch 16 at 2,048, against cached keys and values, eager float32", "at least", 30.0),
    Target("decode", "batch 16, cached / ours, fastest of each",
           "decoding, batch 16 at 2,048, against cached keys and values, fastest of each", "at least", 30.0),
    Target("decode", "batch 1, cached / ours, eager float32",
           "decoding, batch 1 at 2,048, against cached keys and values, eager float32", "at least", 2.5),
    Target("decode", "batch 1, cached / ours, fastest of each",
           "decoding, batch 1 at 2,048, against cached keys and values, fastest of each", "at least", 2.5),
    Target("decode", "batch 16, memory ours / gpt2", "its memory against GPT-2's caches", "at most", 0.05, _PERCENT),
    Target("decode", "1M / 1k", "time of a token at position 1,000,000 against 1,000", "at most", 1.05, _THIRD),
    Target("prefill", "share of the matmul rate at 8192", "prefill, of the matmul rate", "at least", 0.6, _WHOLE),
    Target("busy-ranks", "idle share, 1 rank", "idle share of a rank while work waits", "at most", 0.05, _PERCENT),
    Target("busy-ranks", "idle share, 2 ranks", "idle share of two ranks while work waits", "at most", 0.05, _PERCENT),
    Target("longest-softmax", "best exact / plain", "longest exact softmax, 4 ranks of 1 GB", "at least", 40.0, _TENTH),
    Target("longest-softmax", "linear / plain", "longest linear attention in 1 GB, streamed", "at least", 1e4, _COUNT),
    Target("gpu", "gla / ours forward", "GPU: forward against chunk_simple_gla without features", "at least", 1.0),
    Target("gpu", "sdpa / ours forward", "GPU: forward against flash SDPA, 131,072 tokens", "at least", 20.0),
    Target("gpu", "gla / ours forward and backward", "GPU: forward and backward likewise", "at least", 1.0),
    Target("gpu", "gated delta forward ms, ours", "GPU: gated delta, 32,768 tokens", "at most", 3.33, "{:.2f} ms"),
    Target("gpu", "decode share of bandwidth", "GPU: decode step of 64, of the bandwidth", "at least", 0.6, _WHOLE),
)  # fmt: skip

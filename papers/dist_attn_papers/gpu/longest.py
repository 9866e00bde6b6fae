"""The longest attention within so many bytes per rank on one GPU that four ranks share, at A Unified View's full size.

    dist-attn bench gpu-longest [--json F] [--tiny]

Ranks are threads, copies on the device are their collectives, and each counts the bytes of its own tensors. The sizes
are those of the paper's Figure 6: 96 heads of 128, 12,288 channels, ranks of 24 GB.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory import TrackedMemory
from benchmarks.setting import look_around
from dist_attn.comm import Communicator, run_simulated
from dist_attn.feature_maps import Gaussian
from dist_attn.layout import SequenceLayout
from dist_attn.ops import linear_attention, softmax_attention
from dist_attn.ops.softmax_attention import softmax_attention_naive
from dist_attn.sharded import ShardedSequenceOps, SoftmaxExchange
from dist_attn_papers.ops.columns import columns_to_tokens, tokens_to_columns
from dist_attn_papers.studies.longest_softmax import head_by_head, longest_within

__all__ = ["FULL", "Full", "longest_rows", "main"]

RANKS, TIMEOUT_S = 4, 300.0
MOST_S = 45.0  # a run at the longest length that would take longer is left out
GRID = 64
LINEAR = "linear attention"

Tensors = Sequence[torch.Tensor]
Attend = Callable[[Communicator, SequenceLayout, Tensors], torch.Tensor]


@dataclass(frozen=True)
class Full:
    """What is attended to, and how much a rank may hold. Units: bytes."""

    heads: int = 96
    head_size: int = 128
    budget: int = 24 * 10**9
    dtype: torch.dtype = torch.bfloat16
    quadratic: tuple[int, ...] = (1_024, 2_048, 4_096)
    linear: tuple[int, ...] = (8_192, 16_384, 32_768)

    def inputs(self, tokens: int, device: str) -> list[torch.Tensor]:
        """q, k and v."""
        shape = (1, self.heads, tokens, self.head_size)
        return [torch.randn(shape, dtype=self.dtype, device=device) for _ in range(3)]


FULL = Full()
TINY = Full(4, 8, 2_000_000, torch.float32, (64, 128, 192), (256, 512, 768))


def main(arguments: list[str]) -> int:
    """Exit status 2 without a GPU, unless the sizes are tiny."""
    parser = argparse.ArgumentParser(prog="dist-attn bench gpu-longest")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not given.tiny:
        print("gpu-longest: there is no GPU here; --tiny shows that all of it runs", file=sys.stderr)
        return 2
    rows = longest_rows(tiny=given.tiny)
    print("\n".join(map(json.dumps, rows)))
    if given.json is not None:
        given.json.write_text(json.dumps({"case": "gpu-longest", "setting": asdict(look_around()), "rows": rows}))
    return 0


def longest_rows(*, tiny: bool) -> list[dict[str, Any]]:
    """Each form: bytes and seconds by length, the longest length that follows, and what a run there took."""
    full, device = (TINY, "cpu") if tiny else (FULL, "cuda")
    rows: list[dict[str, Any]] = []
    for name, ranks, degree, attend in _forms(full, device):
        lengths = full.quadratic if degree == 2 else full.linear
        _peak(full, device, ranks, attend, lengths[0])  # what is made at the first call counts as nobody's
        measured = {length: _peak(full, device, ranks, attend, length) for length in lengths}
        coefficients = np.polyfit(list(measured), [most for most, _ in measured.values()], degree)
        longest = longest_within(coefficients, full.budget) // (GRID * ranks) * GRID * ranks
        row: dict[str, Any] = {
            "form": name,
            "ranks": ranks,
            "bytes": {length: most for length, (most, _) in measured.items()},
            "seconds": {length: seconds for length, (_, seconds) in measured.items()},
            "longest": longest,
            "times_plain": round(longest / rows[0]["longest"], 2) if rows else 1.0,
        }
        in_time = 1 if name == LINEAR else 2
        estimate = measured[lengths[-1]][1] * (longest / lengths[-1]) ** in_time
        row |= {"left_out_s": estimate} if estimate > MOST_S else _at(full, device, ranks, attend, longest)
        rows.append(row)
    return rows


def _forms(full: Full, device: str) -> list[tuple[str, int, int, Attend]]:
    """Name, ranks, the degree of bytes in the length, and what a rank does with its slice."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(full.heads, full.head_size // 2, full.head_size, generator=generator)
    feature_map = Gaussian(w.to(device), unit_norm=True)

    def across(exchange: SoftmaxExchange, comm: Communicator, layout: SequenceLayout, qkv: Tensors) -> torch.Tensor:
        return ShardedSequenceOps(comm, layout, softmax=exchange).softmax_attention(*qkv, causal=True)

    def linear(comm: Communicator, layout: SequenceLayout, qkv: Tensors) -> torch.Tensor:
        return ShardedSequenceOps(comm, layout).linear_attention(*qkv, feature_map=feature_map)[0]

    return [
        ("all heads at once", 1, 2, lambda comm, layout, qkv: softmax_attention_naive(*qkv, causal=True)),
        ("one head after the other", 1, 2, lambda comm, layout, qkv: head_by_head(*qkv)),
        ("fused kernel", 1, 1, lambda comm, layout, qkv: softmax_attention(*qkv, causal=True)),
        ("head reshuffle, one head after the other", RANKS, 2, _reshuffled),
        ("head reshuffle", RANKS, 1, partial(across, "reshuffle")),
        ("ring", RANKS, 1, partial(across, "ring")),
        (LINEAR, 1, 1, lambda comm, layout, qkv: linear_attention(*qkv, feature_map=feature_map)[0]),
        (LINEAR, RANKS, 1, linear),
    ]


def _reshuffled(comm: Communicator, layout: SequenceLayout, qkv: Tensors) -> torch.Tensor:
    """The paper's own: a rank takes all tokens of its heads, and whole scores of one head at a time."""
    _, heads, _, size = qkv[0].shape
    of_heads = tokens_to_columns(comm, layout, torch.cat([x[0] for x in qkv], dim=-1), label="heads")
    out = head_by_head(*(x[None] for x in of_heads.split(size, dim=-1)))[0]
    return columns_to_tokens(comm, layout, out, heads, label="heads back")[None]


def _at(full: Full, device: str, ranks: int, attend: Attend, length: int) -> dict[str, Any]:
    try:
        most, seconds = _peak(full, device, ranks, attend, length)
    except torch.OutOfMemoryError as error:
        return {"at_longest": {"error": str(error)[:200]}}
    return {"at_longest": {"bytes": most, "seconds": seconds, "within": most <= full.budget}}


def _peak(full: Full, device: str, ranks: int, attend: Attend, length: int) -> tuple[int, float]:
    """The bytes of tensors of the rank that holds most, and the seconds of all of them together."""
    layout = SequenceLayout.even(length, ranks)

    def body(comm: Communicator) -> int:
        with torch.inference_mode(), TrackedMemory() as tracked:
            attend(comm, layout, full.inputs(layout.lengths[comm.rank], device))
        return int(tracked.peak)

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    began = time.perf_counter()
    peaks = run_simulated(body, ranks, timeout_s=TIMEOUT_S)
    if device == "cuda":
        torch.cuda.synchronize()
    return max(peaks), time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

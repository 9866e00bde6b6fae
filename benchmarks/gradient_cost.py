"""What gradients cost: the backward pass against the forward pass, at the reference shape."""

import torch

from benchmarks.cases import attention_flops, attention_inputs
from benchmarks.measured import Found, Panel, Table
from benchmarks.timing import Roofline, Times, interleaved, rate_works
from dist_attn.ops import linear_attention

__all__ = ["NAME", "QUESTION", "TESTS", "backward_over_forward", "measure"]

NAME = "gradient-cost"
QUESTION = (
    "How much longer than the forward pass is the backward pass? B1 H8 d64, 64 random vectors, float32, causal, "
    "feature map included; the state before each block is kept and the block computed again."
)
TESTS = ("tests/ops/test_linear_attention.py", "tests/test_feature_maps.py")
LENGTHS, SMOKE_LENGTHS = (2_048, 8_192, 32_768), (64, 128)
ROUNDS = 31  # medians of seven scattered between 2.3 and 3.1

WITHOUT, KEEPING, BOTH = "without gradients", "forward, keeping what backward needs", "forward and backward"


def backward_over_forward(without: float, both: float) -> float:
    """What forward and backward take above a forward pass without gradients, in such passes."""
    return (both - without) / without


def measure(smoke: bool) -> Found:
    """Time the passes in turns at every length."""
    lengths = SMOKE_LENGTHS if smoke else LENGTHS
    taken = {length: _times(length, 1 if smoke else ROUNDS) for length in lengths}
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    rows = []
    for length, times in taken.items():
        without, both = times[WITHOUT].median, times[BOTH].median
        ratios[f"backward / forward at {length}"] = round(backward_over_forward(without, both), 4)
        numbers |= {f"{name}, seconds at {length}": one.median for name, one in times.items()}
        cells = [f"{1e3 * times[name].median:,.1f} ms" for name in (WITHOUT, KEEPING, BOTH)]
        spread = max(one.spread for one in times.values())
        rows.append((f"{length:,}", *cells, f"{backward_over_forward(without, both):.2f}", f"{spread:.0%}"))
    longest = lengths[-1]
    roofline = Roofline.of(taken[longest])
    tensor_bytes = 4.0 * 8 * 64 * longest
    notes = (
        "backward / forward: forward and backward together, less a forward pass without gradients, over the latter.",
        roofline.line(
            f"forward and backward at {longest:,}",
            4 * attention_flops(longest),
            11 * tensor_bytes,
            taken[longest][BOTH].median,
        ),
    )
    columns = ("length", WITHOUT, KEEPING, BOTH, "backward / forward", "spread")
    curves = {name: {float(n): times[name].median for n, times in taken.items()} for name in (WITHOUT, KEEPING, BOTH)}
    table = Table("Medians of rounds taken in turns", columns, tuple(rows))
    return Found((table,), ratios, numbers, (Panel("time of a pass", "tokens", "seconds", curves),), notes)


def _times(length: int, rounds: int) -> dict[str, Times]:
    (q, k, v), feature_map = attention_inputs(length, gradients=True)
    weight = torch.randn(v.shape)

    def forward() -> torch.Tensor:
        return linear_attention(q, k, v, feature_map=feature_map)[0]

    works = {
        WITHOUT: torch.no_grad()(forward),
        KEEPING: forward,
        BOTH: lambda: torch.autograd.grad(forward(), (q, k, v), weight),
        **rate_works(),
    }
    return interleaved(works, rounds)

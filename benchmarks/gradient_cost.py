"""What gradients cost: the backward pass against the forward pass, at the reference shape."""

from dataclasses import replace

import torch

from benchmarks import report
from benchmarks.cases import CASES, OURS, Works, attention_inputs
from benchmarks.measured import Found
from benchmarks.timing import rate_works
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

WITHOUT, KEEPING = "without gradients", "keeping what backward needs"
NOTES = (
    f"ours: forward and backward together. {WITHOUT}, and {KEEPING}: the forward pass alone.",
    "backward / forward: forward and backward together, less a forward pass without gradients, over the latter.",
)


def backward_over_forward(without: float, both: float) -> float:
    """What forward and backward take above a forward pass without gradients, in such passes."""
    return (both - without) / without


def measure(smoke: bool) -> Found:
    """Time the passes in turns at every length."""
    lengths = SMOKE_LENGTHS if smoke else LENGTHS
    found = report.measure(replace(CASES["backward"], works=_works), lengths, 1 if smoke else ROUNDS)
    ratios, notes = dict(found.ratios), [*NOTES]
    for length in lengths:
        without, both = (found.numbers[f"{name}, seconds at {length}"] for name in (WITHOUT, OURS))
        ratios[f"backward / forward at {length}"] = round(backward_over_forward(without, both), 4)
        notes.append(f"backward / forward at {length:,}: {backward_over_forward(without, both):.2f}.")
    return Found(found.tables, ratios, found.numbers, found.panels, (*notes, *found.notes))


def _works(length: int) -> Works:
    (q, k, v), feature_map = attention_inputs(length, gradients=True)
    weight = torch.randn(v.shape)

    def forward() -> torch.Tensor:
        return linear_attention(q, k, v, feature_map=feature_map)[0]

    return {
        OURS: lambda: torch.autograd.grad(forward(), (q, k, v), weight),
        WITHOUT: torch.no_grad()(forward),
        KEEPING: forward,
        **rate_works(),
    }

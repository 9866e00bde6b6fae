"""The study of flat memory: what is counted above inputs, outputs and gradients."""

import torch

from benchmarks import flat_memory
from benchmarks.cases import HEAD_SIZE, HEADS, NUM_RANDOM, attention_inputs
from benchmarks.flat_memory import held
from benchmarks.memory import peak_bytes
from dist_attn.ops import linear_attention


def _bytes(way: str, *lengths: int) -> list[float]:
    found = held(flat_memory._attend, flat_memory._inputs, lambda v: v.new_ones(1, 1, 1, 1), lengths)
    return [found.numbers[f"{way} bytes at {length}"] for length in lengths]


OF_OUTPUTS = 4 * HEADS * HEAD_SIZE


def test_forward_is_flat_and_agrees_with_the_allocator() -> None:
    """Twice the tokens hold the same above their outputs; the allocator's own count is no more than a tenth away."""
    short, long = _bytes("forward", 1024, 2048)
    assert short == long > 0
    q, k, v = flat_memory._inputs(1024)
    with torch.no_grad():
        seen = peak_bytes(lambda: linear_attention(q, k, v, feature_map=attention_inputs(1)[1]))
    assert abs(seen - 1024 * OF_OUTPUTS - short) < 0.1 * short


def test_backward_keeps_some_states_but_no_features() -> None:
    """Gradients of four times the tokens hold a few states more: less than a byte per token and head of features."""
    short, long = _bytes("backward", 512, 2048)
    features = 4 * 2 * NUM_RANDOM * HEADS
    assert 0 < short <= long < short + 1536 * features

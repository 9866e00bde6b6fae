"""Attention beside what has no target: the sums that papers print, a library's form, and bfloat16."""

import contextlib
import io
from collections.abc import Callable
from typing import cast

import torch

from benchmarks.cases import (
    HEAD_SIZE,
    NUM_RANDOM,
    OURS,
    SHAPE,
    SIZES,
    TESTS,
    Case,
    Works,
    attention_flops,
    attention_inputs,
    tensor_bytes,
)
from benchmarks.peers import absent, sdpa
from benchmarks.timing import rate_works
from dist_attn.ops import linear_attention
from dist_attn_papers.tables.printed_attention import cumulative_sums

__all__ = ["CASES", "performer"]

LIBRARY = "performer-pytorch"
# Forms that hold (L, M, V) for each head would take 2 GB at 8,192.
WHOLE_STATES = (512, 2_048)


def performer(head_size: int, num_features: int) -> Callable[..., torch.Tensor]:
    """performer-pytorch's causal attention, its features included; without its CUDA extension, which needs a GPU."""
    with contextlib.redirect_stdout(io.StringIO()):
        from performer_pytorch.performer_pytorch import FastAttention

        attention = FastAttention(head_size, nb_features=num_features, causal=True)
    return cast(Callable[..., torch.Tensor], attention)


def _whole_states(length: int) -> Works:
    (q, k, v), feature_map = attention_inputs(length)
    works: dict[str, Callable[[], object]] = {
        OURS: lambda: linear_attention(q, k, v, feature_map=feature_map)[0],
        "cumulative sums": lambda: cumulative_sums(feature_map(q), feature_map(k), v),
    }
    if not absent(LIBRARY):
        attend = performer(HEAD_SIZE, 2 * NUM_RANDOM)
        works[LIBRARY] = lambda: attend(q, k, v)
    return {name: torch.no_grad()(work) for name, work in works.items()} | rate_works()


def _half_precision(length: int) -> Works:
    qkv, feature_map = attention_inputs(length)
    halves = [t.bfloat16() for t in qkv]
    works: dict[str, Callable[[], object]] = {
        OURS: lambda: linear_attention(*halves, feature_map=feature_map)[0],
        "ours, float32": lambda: linear_attention(*qkv, feature_map=feature_map)[0],
        "sdpa": lambda: sdpa(*halves),
    }
    return {name: torch.no_grad()(work) for name, work in works.items()} | rate_works(dtype=torch.bfloat16)


CASES = {
    case.name: case
    for case in (
        Case(
            "half-precision",
            "Attention to bfloat16 queries, keys and values without gradients, against the same in float32 and exact "
            f"attention in bfloat16; {SHAPE.replace('float32, ', '')}.",
            (*TESTS, "tests/ops/test_native_halves.py"),
            SIZES,
            _half_precision,
            attention_flops,
            lambda length: 2 * tensor_bytes(length),
        ),
        Case(
            "whole-states",
            "Attention without gradients against the running sums that papers print and a library, which hold a state "
            f"for each token; {SHAPE}.",
            (*TESTS, "papers/tests/test_attention_peers.py"),
            WHOLE_STATES,
            _whole_states,
            attention_flops,
            lambda length: 4 * tensor_bytes(length),
            absent=lambda: absent(LIBRARY),
        ),
    )
}

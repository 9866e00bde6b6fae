"""What can be measured: for each size the works that are run in turns, and how many operations ours needs at least."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from benchmarks.peers import require, sdpa
from benchmarks.timing import rate_works
from dist_attn.checkpoints import fuses_on_cpus, load_stream_encoder
from dist_attn.devices import compute_on
from dist_attn.feature_maps import Gaussian
from dist_attn.mixers import RandomFeatureConfig
from dist_attn.model_config.figures import GRAIN
from dist_attn.models import ModelState
from dist_attn.ops import linear_attention
from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder

__all__ = [
    "ALONE", "CASES", "OURS", "Case", "Statistic", "Works", "attention_flops", "attention_inputs", "delta_inputs",
]  # fmt: skip

OURS, ALONE = "ours", "forward alone"

HEADS, HEAD_SIZE, NUM_RANDOM = 8, 64, 64
_HEADS = {"hidden_size": HEADS * HEAD_SIZE, "num_heads": HEADS, "num_random": NUM_RANDOM}
COSTS = RandomFeatureConfig(kind="rfa", short_convolution=0, **_HEADS)
"""Formulas of the reference shape, without a short convolution."""

SIZES = (512, 2_048, 8_192, 32_768)
Works = Mapping[str, Callable[[], object]]
Statistic = Literal["median", "fastest"]


@dataclass(frozen=True)
class Case:
    """One measurement. `works(size)` holds "ours", its peers, and "matmul" and "copy", which measure the machine.

    A work "forward alone" is what ours takes without gradients.

    A peer may be missing at sizes that are too large for it; `absent()` says which cannot run here at all, and why.
    Units: `flops(size)` floating-point operations of the form used, `moved_bytes(size)` what it reads and writes at the
    least; `tests` are paths from the root; `budget_s` seconds for a size, after which three rounds are enough.
    `statistic`: which of the rounds counts.
    """

    name: str
    question: str
    tests: tuple[str, ...]
    sizes: tuple[int, ...]
    works: Callable[[int], Works]
    flops: Callable[[int], float]
    moved_bytes: Callable[[int], float]
    rounds: int = 7
    budget_s: float = math.inf
    statistic: Statistic = "median"
    absent: Callable[[], Mapping[str, str]] = dict


def attention_flops(length: int) -> float:
    """Of the blocked form without gradients at the reference shape, features included."""
    flops = COSTS.prefill_flops(length)
    return length * (flops.total - flops.projections)


def tensor_bytes(length: int) -> float:
    """Of one of q, k, v and the outputs."""
    return 4.0 * HEADS * HEAD_SIZE * length


def attention_inputs(length: int, *, gradients: bool = False) -> tuple[list[torch.Tensor], Gaussian]:
    """q, k, v and the feature map of the reference shape."""
    generator = torch.Generator().manual_seed(length)
    shape = (3, 1, HEADS, length, HEAD_SIZE)
    qkv = [t.clone().requires_grad_(gradients) for t in torch.randn(shape, generator=generator)]
    return qkv, Gaussian(torch.randn(HEADS, NUM_RANDOM, HEAD_SIZE, generator=generator), unit_norm=True)


def delta_inputs(length: int, heads: int = HEADS, size: int = 128) -> list[torch.Tensor]:
    """q, k, v, log decays and beta of a gated delta rule, K = V; keys of norm 1, decays that forget some tens."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn((3, 1, heads, length, size), generator=generator)
    decay, beta = torch.randn((2, 1, heads, length), generator=generator)
    return [q / size**0.5, F.normalize(k, dim=-1), v, F.logsigmoid(decay + 3)[..., None], beta.sigmoid()]


def _forward(length: int) -> Works:
    (q, k, v), feature_map = attention_inputs(length)
    return {
        OURS: torch.no_grad()(lambda: linear_attention(q, k, v, feature_map=feature_map)[0]),
        "sdpa": torch.no_grad()(lambda: sdpa(q, k, v)),
        **rate_works(),
    }


def _backward(length: int) -> Works:
    (q, k, v), feature_map = attention_inputs(length, gradients=True)
    weight = torch.randn(v.shape)

    def forward() -> torch.Tensor:
        return linear_attention(q, k, v, feature_map=feature_map)[0]

    def differentiate(attend: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), (q, k, v), weight)

    return {
        OURS: differentiate(forward),
        ALONE: torch.no_grad()(forward),
        "sdpa": differentiate(lambda: sdpa(q, k, v)),
        **rate_works(),
    }


MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1_536}
SMOLLM2 = {
    "vocab_size": 49_152, "hidden_size": 576, "num_hidden_layers": 12, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1_536, "tie_word_embeddings": True,
}  # fmt: skip
ENCODER_WEIGHTS, STEP_WEIGHTS = 10_616_832, 70_778_880  # of their products
WINDOW = 256
"""Tokens of a text that BERT reads."""


def _encoder(length: int) -> Works:
    """The encoder that ships over one stream; BERT of its size over windows, in the same precision."""
    require("transformers")
    from transformers import BertConfig, BertModel

    compute = compute_on(torch.device("cpu"), fused=fuses_on_cpus(DEFAULT_ENCODER))
    model = load_stream_encoder(resolve_model_folder(DEFAULT_ENCODER))
    with compute.autocast():
        model.pack_weights()
    bert = BertModel(BertConfig(**MINILM)).eval().to(compute.dtype)
    tokens_L = torch.randint(1_000, 20_000, (length,), generator=torch.Generator().manual_seed(0))
    windows_NC = tokens_L.reshape(-1, min(WINDOW, length))

    def stream() -> torch.Tensor:
        state, read = None, []
        with compute.autocast():
            for some_1L in tokens_L[None].split(GRAIN, dim=1):
                h_1LD, state = model.hidden(some_1L, state=state)
                read.append(h_1LD[0])
        return torch.cat(read)

    return {
        OURS: torch.inference_mode()(stream),
        "transformers": torch.inference_mode()(lambda: bert(windows_NC).last_hidden_state.flatten(0, 1)),
        **rate_works(compute.dtype),
    }


def _steps(rows: int) -> Works:
    """A token of each of so many texts, in bfloat16, from the empty state."""
    require("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from dist_attn.adapters.binding import ATTENTION
    from dist_attn.adapters.model import AdaptedModel

    theirs = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval().to(torch.bfloat16)
    own = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval().to(torch.bfloat16)
    own.set_attn_implementation(ATTENTION)
    ours, tokens_B = AdaptedModel(own), torch.arange(rows)
    states = ModelState.stack([ours.initial_state(1)] * rows)
    return {
        OURS: torch.inference_mode()(lambda: ours.step(tokens_B, states)[0]),
        "transformers": torch.inference_mode()(lambda: theirs(tokens_B[:, None], use_cache=True).logits[:, -1]),
        **rate_works(torch.bfloat16),
    }


SHAPE = f"B1 H{HEADS} d{HEAD_SIZE}, {NUM_RANDOM} random vectors, float32, causal, feature map included"
TESTS = ("tests/ops/test_linear_attention.py", "tests/test_feature_maps.py", "tests/ops/test_softmax_attention.py")

CASES = {
    case.name: case
    for case in (
        Case(
            "forward",
            f"Attention without gradients against exact attention; {SHAPE}.",
            TESTS,
            SIZES,
            _forward,
            attention_flops,
            lambda length: 4 * tensor_bytes(length),
        ),
        # The backward pass computes each product's two adjoints, and the forward pass once more. It reads q, k, v and
        # the outputs' gradient and writes three gradients, after the forward pass's four tensors.
        Case(
            "backward",
            f"Attention and its gradients for q, k, v against exact attention; {SHAPE}.",
            TESTS,
            SIZES[:3],
            _backward,
            lambda length: 4 * attention_flops(length),
            lambda length: 11 * tensor_bytes(length),
        ),
        Case(
            "encoder",
            "The encoder that ships, over one stream, against BERT of its size in the same precision.",
            ("tests/ops/test_fused_encoder.py", "tests/models/test_stream_encoder.py"),
            (4_096,),
            _encoder,
            lambda length: 2 * ENCODER_WEIGHTS * length,
            lambda length: 2 * ENCODER_WEIGHTS,
        ),
        Case(
            "step",
            "A token of 1 and of 8 texts by 12 layers of SmolLM2-135M's sizes, bfloat16, against their modules.",
            ("tests/ops/test_decode_step.py", "tests/adapters/test_fused_step.py"),
            (1, 8),
            _steps,
            lambda rows: 2 * STEP_WEIGHTS * rows,
            lambda rows: 2 * STEP_WEIGHTS,
        ),
    )
}

"""How fast whole models are on this GPU: decode steps alone and side by side, and reading, beside BERT of the size.

Weights are random, for speed does not depend on them: so no model's file has to be there, only its configuration.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import torch

from benchmarks.gpu.cases import DEVICE, Cases, Row, seconds
from benchmarks.setting import ROOT
from dist_attn.devices import Compute, compute_on
from dist_attn.generation import CapturedStep
from dist_attn.model_config import figures
from dist_attn.model_config.folder import read_any_config
from dist_attn.models import build_model
from dist_attn.models.causal_model import CausalModel, StreamingModel
from dist_attn.ops import LocalSequenceOps
from dist_attn.wire.choices import Precision

__all__ = ["ENCODER", "WRITER", "decode_cases", "encode_cases", "encode_work", "step_works"]

DTYPES: tuple[Precision, ...] = ("bfloat16", "float32")
WRITER, ENCODER = "writer-12m", "minilm-stream"


def decode_cases(*, tiny: bool) -> Cases:
    """Tokens a second of the model that writes."""
    batches, steps = ((2,), 3) if tiny else ((1, 64), 50)
    return {
        f"decode {WRITER} batch {batch} {dtype}": partial(_decode, batch, dtype, steps)
        for batch in batches
        for dtype in DTYPES
    }


def encode_cases(*, tiny: bool) -> Cases:
    """Tokens a second of hidden states, of the encoder first; then BERT's, where transformers is installed."""
    lengths = (1_024,) if tiny else (131_072, 8_192)
    cases: Cases = {
        f"encode {model} {length} {dtype}": partial(_encode, model, length, dtype, 0 if tiny else 3)
        for model in (ENCODER, WRITER)
        for length in lengths
        for dtype in DTYPES
    }
    cases |= {
        f"encode {ENCODER} {lengths[0]} bfloat16, {together} together": partial(
            _encode, ENCODER, lengths[0], "bfloat16", 0 if tiny else 3, together
        )
        for together in ((512,) if tiny else (32_768, 131_072))
    }
    if find_spec("transformers") is not None:
        cases["encode BERT bfloat16"] = partial(_bert, *((2, 64, 0) if tiny else (256, 256, 5)))
    return cases


def _model(name: str, dtype: Precision) -> tuple[StreamingModel, Compute]:
    torch.manual_seed(0)
    model = build_model(read_any_config(ROOT / "dist_attn/shipped" / name))
    assert isinstance(model, StreamingModel)
    return model.eval().to(DEVICE), compute_on(torch.device(DEVICE), dtype)


def step_works(batch: int, dtype: Precision, steps: int) -> dict[str, Callable[[], object]]:
    """Steps of the model that writes, each token the likeliest after the one before, as a CUDA graph and one by one."""
    model, compute = _model(WRITER, dtype)
    assert isinstance(model, CausalModel)
    state, captured = model.initial_state(batch), CapturedStep(model, model.initial_state(batch))

    def eager(token_B: torch.Tensor) -> torch.Tensor:
        nonlocal state
        logits_BV, state = model.step(token_B, state)
        return logits_BV

    def walk(step: Callable[[torch.Tensor], torch.Tensor]) -> str:
        token_B = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        with torch.inference_mode(), compute.autocast():
            for _ in range(steps):
                token_B = step(token_B).argmax(-1)
        return captured.how

    return {"captured": partial(walk, captured.step), "eager": partial(walk, eager)}


def _decode(batch: int, dtype: Precision, steps: int) -> Row:
    """Both ways of step, and how the first was done."""
    works, rounds = step_works(batch, dtype, steps), 0 if steps < 10 else 3
    rates = {f"{name} tokens/s": batch * steps / seconds(work, rounds) for name, work in works.items()}
    return {**rates, "how": works["captured"]()}


def encode_work(name: str, length: int, dtype: Precision, together: int = figures.GPU_TOKENS) -> Callable[[], object]:
    """Hidden states of one text, whose tokens are on the device, so many `together` in a pass of an encoder."""
    model, compute = _model(name, dtype)
    tokens_BL = torch.randint(5, 4_000, (1, length), device=DEVICE)

    def read() -> object:
        with torch.inference_mode(), compute.autocast(), patch.object(figures, "GPU_TOKENS", together):
            return model.hidden(tokens_BL, LocalSequenceOps())

    return read


def _encode(name: str, length: int, dtype: Precision, rounds: int, together: int = figures.GPU_TOKENS) -> Row:
    return {"tokens/s": length / seconds(encode_work(name, length, dtype, together), rounds)}


def _bert(batch: int, length: int, rounds: int) -> Row:
    """transformers' encoder of the size of ours, by SDPA, over texts of one length."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(config).eval().to(DEVICE, torch.bfloat16)
    ids_BL = torch.randint(1_000, 20_000, (batch, length), device=DEVICE)
    mask_BL = torch.ones_like(ids_BL)
    with torch.inference_mode():
        taken = seconds(lambda: model(input_ids=ids_BL, attention_mask=mask_BL), rounds)
    return {"batch": batch, "length": length, "tokens/s": batch * length / taken}

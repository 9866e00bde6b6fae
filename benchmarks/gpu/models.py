"""How fast whole models are on this GPU: decode steps alone and side by side, and reading, beside BERT of the size.

Weights are random, for speed does not depend on them: so no model's file has to be there, only its configuration.
"""

from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.gpu.cases import DEVICE, Cases, Row, seconds
from benchmarks.setting import ROOT
from dist_attn.devices import Compute, compute_on
from dist_attn.generation import CapturedStep
from dist_attn.model_config.folder import read_any_config
from dist_attn.models import build_model
from dist_attn.models.causal_model import CausalModel, StreamingModel
from dist_attn.ops import LocalSequenceOps
from dist_attn.wire.choices import Precision

__all__ = ["decode_cases", "encode_cases"]

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
    if find_spec("transformers") is not None:
        cases["encode BERT bfloat16"] = partial(_bert, *((2, 64, 0) if tiny else (256, 256, 5)))
    return cases


def _model(name: str, dtype: Precision) -> tuple[StreamingModel, Compute]:
    torch.manual_seed(0)
    model = build_model(read_any_config(ROOT / "dist_attn/shipped" / name))
    assert isinstance(model, StreamingModel)
    return model.eval().to(DEVICE), compute_on(torch.device(DEVICE), dtype)


def _decode(batch: int, dtype: Precision, steps: int) -> Row:
    """Step by step and as a CUDA graph, each token the likeliest after the one before, chosen on the device."""
    model, compute = _model(WRITER, dtype)
    assert isinstance(model, CausalModel)
    rounds = 0 if steps < 10 else 3
    with torch.inference_mode(), compute.autocast():
        state, captured = model.initial_state(batch), CapturedStep(model, model.initial_state(batch))

        def eager() -> None:
            nonlocal state
            token_B = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
            for _ in range(steps):
                logits_BV, state = model.step(token_B, state)
                token_B = logits_BV.argmax(-1)

        def replayed() -> None:
            token_B = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
            for _ in range(steps):
                token_B = captured.step(token_B).argmax(-1)

        works = {"captured": replayed, "eager": eager}
        rates = {f"{name} tokens/s": batch * steps / seconds(work, rounds) for name, work in works.items()}
    return {**rates, "how": captured.how}


def _encode(name: str, length: int, dtype: Precision, rounds: int) -> Row:
    """One text, whose tokens are on the device."""
    model, compute = _model(name, dtype)
    tokens_BL = torch.randint(5, 4_000, (1, length), device=DEVICE)
    with torch.inference_mode(), compute.autocast():
        return {"tokens/s": length / seconds(lambda: model.hidden(tokens_BL, LocalSequenceOps()), rounds)}


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

"""What `gpu_check` runs of the captured decode step: whether a graph gives what plain steps give, and times of both."""

from functools import partial

import torch

from dist_attn.generation import CapturedStep
from dist_attn.model_config.mixer import MixerConfig
from dist_attn.model_config.mixers.attention import ScaleformerConfig
from dist_attn.model_config.mixers.kernels import RandomFeatureConfig
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.ops import Watch, watching
from dist_attn_research.gpu.cases import ACCEPTED, DEVICE, Row, largest_errors, seconds

__all__ = ["check_graph", "graph_rows"]

BATCH = 8  # as many sequences as `engine.decode_slots` puts side by side


def _model(kind: str, *, tiny: bool) -> LanguageModel:
    """Of the size of GPT-2 small, or of two small layers."""
    size, heads, layers, vocabulary = (16, 2, 2, 64) if tiny else (768, 12, 12, 16_384)
    mixer: MixerConfig = RandomFeatureConfig(kind="rfa_gate", hidden_size=size, num_heads=heads)
    if kind == "scaleformer":
        mixer = ScaleformerConfig(kind="scaleformer", hidden_size=size, num_heads=heads)
    config = LanguageModelConfig(
        vocab_size=vocabulary, hidden_size=size, num_layers=layers, mlp_size=4 * size, mixer=mixer
    )
    return build_model(config).eval().to(DEVICE)


def check_graph(*, tiny: bool) -> list[Row]:
    """Logits and state after steps over buffers against those of plain steps; on a GPU also that it is a graph."""
    torch.manual_seed(0)
    return [_correct(kind, tiny=tiny) for kind in ("rfa_gate", "scaleformer")]


def _correct(kind: str, *, tiny: bool) -> Row:
    model = _model(kind, tiny=tiny)
    state = model.initial_state(BATCH)
    captured = CapturedStep(model, state)
    watches = Watch(), Watch()
    with torch.inference_mode():
        for t in range(6):
            token_B = torch.arange(BATCH, device=DEVICE) + t
            with watching(watches[0]):
                want_BV, state = model.step(token_B, state)
            with watching(watches[1]):
                got_BV = captured.step(token_B)
    found: list[dict[str, torch.Tensor | None]] = []
    for logits_BV, after in ((want_BV, state), (got_BV, captured.state)):
        tensors = {f"state {n} {i}": t for n, layer in enumerate(after.layers) for i, t in enumerate(layer.tensors())}
        # A log decay of no gate, and what has not left a window yet, are zeros, and errors relative to nothing.
        found.append({"logits": logits_BV, **{n: t for n, t in tensors.items() if t.is_floating_point() and t.any()}})
    errors = largest_errors(*found)
    counted = (watches[0].denominators, watches[0].guarded) == (watches[1].denominators, watches[1].guarded)
    right = max(errors.values()) < ACCEPTED[torch.float32] and counted
    graph = captured.how == "a CUDA graph" or DEVICE != "cuda"
    worst = {"logits": errors.pop("logits"), "states": max(errors.values())}
    return {"case": f"captured step, {kind}", "how": captured.how, "errors": worst, "right": right and graph}


def graph_rows(*, tiny: bool) -> list[Row]:
    """Seconds of one step of a batch, plain and captured."""
    rows: list[Row] = []
    for kind in ("rfa_gate", "scaleformer"):
        model = _model(kind, tiny=tiny)
        state, token_B = model.initial_state(BATCH), torch.arange(BATCH, device=DEVICE)
        captured = CapturedStep(model, state)
        with torch.inference_mode():
            captured.step(token_B)
            plain = seconds(partial(model.step, token_B, state), 1 if tiny else 20)
            graphed = seconds(partial(captured.step, token_B), 1 if tiny else 20)
        rows.append({"kind": kind, "batch": BATCH, "how": captured.how, "plain": plain, "captured": graphed})
    return rows

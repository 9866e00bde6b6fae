"""MiniLM on one thread as each peer runs it fastest, beside the stream encoder that ships, on the same tokens."""

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import Table
from dist_attn.checkpoints import fuses_on_cpus, load_stream_encoder
from dist_attn.devices import compute_on
from dist_attn.model_config.figures import GRAIN
from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder

BATCH, BLOCK = 16, 256
CPU = torch.device("cpu")
Read = Callable[[], torch.Tensor]  # vectors [BATCH, D], the means of hidden states


def arms_table(folder: Path, work: Path, rounds: int) -> tuple[Table, Mapping[str, float]]:
    """Tokens a second of processor time, in turns, and the smallest cosine of a block's vector to that in float32.

    `folder` holds MiniLM, `work` takes what peers make of it. What is not installed is left out.
    """
    tokens_NC = torch.randint(1000, 20000, (BATCH, BLOCK), generator=torch.Generator().manual_seed(0))
    given = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        arms = {**_ours(tokens_NC), **_peers(folder, work, tokens_NC)}
        read = {name: arm() for name, arm in arms.items()}
        seconds = dict.fromkeys(arms, float("inf"))
        for _ in range(rounds):
            for name, arm in arms.items():
                began = time.process_time()
                arm()
                seconds[name] = min(seconds[name], time.process_time() - began)
    finally:
        torch.set_num_threads(given)
    rates = {name: tokens_NC.numel() / s for name, s in seconds.items()}
    exact = {True: read["ours, float32"], False: read["torch, float32"]}
    rows = []
    for name, rate in rates.items():
        want_ND = exact[name.startswith("ours")]
        cosine = float(torch.nn.functional.cosine_similarity(read[name], want_ND, dim=-1).min())
        rows.append((name, f"{rate:,.0f} tokens/s", f"{cosine:.5f}"))
    title = f"One thread, {BATCH} blocks of {BLOCK} tokens"
    return Table(title, ("arm, precision", "processor time", "smallest cosine to float32"), tuple(rows)), rates


def _ours(tokens_NC: torch.Tensor) -> dict[str, Read]:
    """The blocks as one stream, in passes as an engine's, with the layer of memory behind them."""
    arms = dict[str, Read]()
    for compute in (compute_on(CPU, fused=fuses_on_cpus(DEFAULT_ENCODER)), compute_on(CPU, "float32")):
        model = load_stream_encoder(resolve_model_folder(DEFAULT_ENCODER))
        with compute.autocast():
            model.pack_weights()

        def read(model: Any = model, compute: Any = compute) -> torch.Tensor:
            with torch.inference_mode(), compute.autocast():
                state, read = None, []
                for some_1L in tokens_NC.reshape(1, -1).split(GRAIN, dim=1):
                    h_1LD, state = model.hidden(some_1L, state=state)
                    read.append(h_1LD.reshape(-1, BLOCK, h_1LD.shape[-1]).mean(1))
                return torch.cat(read)

        arms[f"ours, {compute.precision}"] = read
    return arms


def _peers(folder: Path, work: Path, tokens_NC: torch.Tensor) -> dict[str, Read]:
    from transformers import AutoModel

    seen_NC, arms = torch.ones_like(tokens_NC), dict[str, Read]()
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModel.from_pretrained(folder).eval().to(dtype)

        def read(model: Any = model) -> torch.Tensor:
            with torch.inference_mode():
                h_NCD: torch.Tensor = model(input_ids=tokens_NC, attention_mask=seen_NC)[0]
                return h_NCD.float().mean(1)

        arms[f"torch, {str(dtype).removeprefix('torch.')}"] = read
    inputs = {"input_ids": tokens_NC, "attention_mask": seen_NC}
    named = _Named(AutoModel.from_pretrained(folder).eval())
    if find_spec("openvino"):
        arms["OpenVINO, bfloat16"] = _openvino(named, inputs)
    if find_spec("onnxruntime") and find_spec("onnx"):
        arms["ONNX Runtime, int8"] = _onnx(named, inputs, work)
    return arms


class _Named(torch.nn.Module):
    """Hidden states alone, of inputs in order, as exporters want it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return hidden


def _openvino(model: _Named, inputs: Mapping[str, torch.Tensor]) -> Read:
    openvino: Any = import_module("openvino")
    made = openvino.convert_model(model, example_input=dict(inputs))
    hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(made, "CPU", hints).create_infer_request()
    given = [x.numpy() for x in inputs.values()]
    return lambda: torch.from_numpy(next(iter(request.infer(given).values()))).float().mean(1)


def _onnx(model: _Named, inputs: Mapping[str, torch.Tensor], work: Path) -> Read:
    """Weights by channel and activations as they come, in 8 bits."""
    onnxruntime: Any = import_module("onnxruntime")
    exact, small = work / "exact.onnx", work / "int8.onnx"
    torch.onnx.export(model, tuple(inputs.values()), exact, input_names=list(inputs), dynamo=False, opset_version=17)
    import_module("onnxruntime.quantization").quantize_dynamic(exact, small, per_channel=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(small, options, providers=["CPUExecutionProvider"])
    given = {name: x.numpy() for name, x in inputs.items()}
    return lambda: torch.from_numpy(session.run(None, given)[0]).mean(1)

"""Whole models on the GPU: a decode step as a CUDA graph, training, and the command line as other cases run it."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.cases import DEVICE, Cases, Row, seconds
from benchmarks.setting import ROOT
from dist_attn.control.ranks import child_environment
from dist_attn.generation import CapturedStep
from dist_attn.model_config.mixer import mixer_config_class
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.ops import Watch, watching
from tests.gpu.judging import ACCEPTED, judged

__all__ = [
    "MODEL",
    "SHARED",
    "captured_cases",
    "captured_values",
    "compared",
    "dist_attn",
    "small_gpt",
    "training_cases",
    "write_book",
]

MODEL = "books-6m"
# Where several ranks are to share the one GPU; of a CPU there is only one.
SHARED = "cuda:0" if DEVICE == "cuda" else "cpu"
DEADLINE_S = 300.0  # the piece that waits for a command has a shorter one


def write_book(folder: Path, size: int) -> Path:
    """A file of so many characters: the pages of the documentation, one after the other."""
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    book = folder / "book.txt"
    book.write_text((pages * (1 + size // len(pages)))[:size])
    return book


def dist_attn(*words: str, ranks: int = 0) -> str:
    """Run a command, over `ranks` where these are given; what it prints.

    Raises: RuntimeError with the end of what it said where it fails.
    """
    command = [sys.executable, "-m", "dist_attn", *words, *([f"--ranks={ranks}"] if ranks else [])]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"dist-attn {' '.join(words)} ended with {done.returncode}: {done.stderr[-2_000:]}")
    return done.stdout


def compared(want: Path, got: Path, dtype: torch.dtype) -> Row:
    """Two files of rows."""
    wanted, found = (torch.from_numpy(np.load(file)) for file in (want, got))
    return {"rows": len(found), **judged({"rows": wanted}, {"rows": found}, dtype)}


BATCH = 8  # as many sequences as `engine.decode_slots` puts side by side
KINDS = ("rfa_gate", "softmax")


def captured_cases(*, tiny: bool) -> Cases:
    """Values of steps."""
    return {f"values, {kind}": partial(captured_values, kind, tiny) for kind in KINDS}


def small_gpt(kind: str, tiny: bool) -> LanguageModel:
    """Of the size of GPT-2 small, or of two small layers."""
    size, heads, layers, vocabulary = (16, 2, 2, 64) if tiny else (768, 12, 12, 16_384)
    mixer = mixer_config_class(kind).model_validate({"kind": kind, "hidden_size": size, "num_heads": heads})
    config = LanguageModelConfig(
        vocab_size=vocabulary, hidden_size=size, num_layers=layers, mlp_size=4 * size, mixer=mixer
    )
    torch.manual_seed(0)
    return build_model(config).eval().to(DEVICE)


def captured_values(kind: str, tiny: bool) -> Row:
    """Logits, states and guarded denominators after steps over buffers; on a GPU also that they are a graph."""
    model = small_gpt(kind, tiny)
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
        last = after.select(BATCH - 1)  # keys and values lie in slots where steps are captured
        tensors = {f"state {n} {i}": t for n, layer in enumerate(last.layers) for i, t in enumerate(layer.tensors())}
        # A log decay of no gate, and what has not left a window yet, are zeros, and errors relative to nothing.
        found.append({"logits": logits_BV, **{n: t for n, t in tensors.items() if t.is_floating_point() and t.any()}})
    row = judged(found[0], found[1], torch.float32)
    counted = (watches[0].denominators, watches[0].guarded) == (watches[1].denominators, watches[1].guarded)
    graph = captured.how == "a CUDA graph" or DEVICE != "cuda"
    worst = max(row["errors"].values())
    return {"how": captured.how, "worst": worst, "counted": counted, "right": row["right"] and counted and graph}


def training_cases(*, tiny: bool) -> Cases:
    """A few steps whose losses are those of the CPU; then a hundred, of the model that ships and of some 100M."""
    if tiny:
        return {"losses as on the CPU": _losses, "4 steps": partial(_hundred_steps, 32, 2, 2, 2, 32, 4)}
    return {
        "100 steps, 100M": partial(_hundred_steps, 768, 12, 12, 16, 1_024, 100),
        "losses as on the CPU": _losses,
        "100 steps, books-6m": partial(_hundred_steps, 256, 6, 4, 32, 512, 100),
    }


def _losses() -> Row:
    """Ten steps in float32 from the same weights over the same rows."""
    found = []
    for device in dict.fromkeys(("cpu", DEVICE)):
        lines, _ = _trained(32, 2, 2, 2, 32, 10, {"device": device, "dtype": "float32", "log_every": 1})
        found.append({"losses": torch.tensor([line["loss"] for line in lines if "loss" in line])})
    row = judged(found[0], found[-1], torch.float32)
    # Roundings grow from step to step.
    return {**row, "right": row["errors"]["losses"] < 10 * ACCEPTED[torch.float32]}


def _hundred_steps(size: int, layers: int, heads: int, batch: int, segment: int, steps: int) -> Row:
    """Tokens a second, once all is compiled, and at six operations a parameter and token their share of the peak."""
    options = {"device": DEVICE, "dtype": "auto", "log_every": max(1, steps // 5)}
    lines, parameters = _trained(size, layers, heads, batch, segment, steps, options)
    losses = [line["loss"] for line in lines if "loss" in line]
    rate = max(line.get("tokens_per_second", 0.0) for line in lines)
    peak = _matmul_rate(64 if steps < 100 else 8_192)
    row = {"parameters": parameters, "tokens_per_second": rate, "matmul_flops": peak, "losses": losses}
    # Four steps of a test may go up.
    return {**row, "share_of_peak": 6 * parameters * rate / peak, "right": steps < 100 or losses[-1] < losses[0]}


def _trained(
    size: int, layers: int, heads: int, batch: int, segment: int, steps: int, options: Mapping[str, Any]
) -> tuple[list[Row], int]:
    """What `dist-attn train` wrote down, and the number of parameters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        book = write_book(folder, 20_000 if size < 100 else 500_000)
        sections: dict[str, dict[str, Any]] = {
            "model": {"vocab_size": 4096, "hidden_size": size, "num_layers": layers, "mlp_size": 4 * size},
            "model.mixer": {"kind": "rfa_gate", "hidden_size": size, "num_heads": heads, "num_random": 64},
            "data": {"train": [str(book)], "tokeniser": MODEL, "batch": batch, "segment": segment},
            "run": {"folder": str(folder / "run"), "steps": steps, "tensorboard": False, "plot": False, **options},
        }
        tables = (
            f"[{title}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
            for title, section in sections.items()
        )
        (folder / "train.toml").write_text("\n".join(tables))
        dist_attn("train", str(folder / "train.toml"))
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        return lines, (folder / "run/model/model.safetensors").stat().st_size // 2  # weights are kept in 16 bits


def _matmul_rate(size: int) -> float:
    """Operations a second of a product of square matrices in bfloat16."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, 10)

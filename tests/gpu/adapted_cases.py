"""Models of transformers on a GPU: gradients over ranks, and what a training step of a long text takes.

Ranks over gloo share the one GPU, so their memory is that of a rank and their time is not.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Mamba2Config, Qwen3NextConfig

from benchmarks.gpu.cases import DEVICE, Cases, Row
from dist_attn import context_parallel
from dist_attn.comm.torch_dist import TorchDistCommunicator
from tests.adapters.test_context_parallel import TOTAL, alone, errors, gradients, ids, made

__all__ = ["adapted_cases", "long_text_cases"]

TIMEOUT_S = 40.0
ACCEPTED = 5e-4  # of a gradient's largest number; decays of delta rules are sums over all tokens that nearly cancel
SMALL = ("qwen3_next", "mamba2", "falcon_h1", "gemma3_text")
LONG = ("qwen3_next", "mamba2")
# Hidden size, layers, heads and their size.
SIZES = {"tiny": (32, 4, 2, 16), "100M": (768, 12, 12, 64), "1B": (2_048, 16, 32, 64)}
Step = tuple[float, dict[str, torch.Tensor]]


def adapted_cases(*, tiny: bool) -> Cases:
    """Loss and gradients of small models over ranks against one process on the CPU."""
    groups = [("gloo", 2)] if tiny else [("gloo", 3), ("gloo", 2), *([("nccl", 1)] if DEVICE == "cuda" else [])]
    return {f"gradients, {backend}, {ranks} ranks": partial(_gradients, backend, ranks) for backend, ranks in groups}


def long_text_cases(*, tiny: bool) -> Cases:
    """Steps in bfloat16 with float32 weights, layers computed again in the backward pass."""
    lengths, kinds = ((64,), LONG[:1]) if tiny else ((16_384, 65_536), LONG)
    cases: Cases = {
        f"{kind}, {ranks} of gloo" if ranks > 1 else kind: partial(
            _long, partial(_config, kind, "tiny" if tiny else "100M"), lengths, ranks
        )
        for kind in kinds
        for ranks in (2, 1)
    }
    if not tiny:
        cases["qwen3_next, 1B"] = partial(_long, partial(_config, "qwen3_next", "1B"), (32_768,), 1)
    return cases


def _gradients(backend: str, ranks: int) -> Row:
    """The furthest gradient of each type on any rank, and what failed, in float32."""
    _hide_fla()
    found = _over(backend, ranks, _small_steps)
    worst: dict[str, Any] = {}
    for kind in SMALL:
        want = alone(kind)
        for step in (steps.get(kind, "not tried") for steps in found):
            if isinstance(step, str):
                worst[kind] = step
                break
            distance = max(abs(step[0] / want[0] - 1), *errors(step[1], want[1]).values())
            worst[kind] = max(worst.get(kind, 0.0), distance)
    return {"worst": worst, "right": all(isinstance(one, float) and one < ACCEPTED for one in worst.values())}


def _small_steps(rank: int, size: int) -> dict[str, Step | str]:
    """A step of each type with slices that differ, the last of three without tokens; of one that failed the words."""
    torch.backends.cudnn.allow_tf32 = False
    lengths, steps = {1: (TOTAL,), 2: (20, TOTAL - 20), 3: (20, TOTAL - 20, 0)}[size], dict[str, Step | str]()
    batch = {"input_ids": ids().to(DEVICE), "labels": ids().to(DEVICE)}
    for kind in SMALL:
        try:
            model = made(kind).to(DEVICE)
            parallel = context_parallel(model, dist.group.WORLD)
            loss = model(**parallel.shard(batch, lengths=lengths), use_cache=False).loss
            loss.backward()
            parallel.sum_gradients()
            steps[kind] = loss.item(), {name: grad.cpu() for name, grad in gradients(model).items()}
        except Exception as error:
            steps[kind] = f"{type(error).__name__}: {error}"[:500]
            break  # other ranks may wait inside this model's exchanges
    return steps


def _long(config: Callable[[], Any], lengths: Sequence[int], ranks: int) -> Row:
    """Tokens a second and the most memory of a rank, by length; on one rank transformers alone too."""
    backend = "gloo" if ranks > 1 or DEVICE != "cuda" else "nccl"
    row: Row = {}
    for found in _over(backend, ranks, partial(_long_steps, config, lengths)):
        for name, number in found.items():
            fits = min if name.endswith("tokens/s") else max
            row[name] = fits(row.get(name, number), number) if isinstance(number, float) else number
    return row


def _long_steps(config: Callable[[], Any], lengths: Sequence[int], rank: int, size: int) -> Row:
    torch.manual_seed(0)
    row: Row = {}
    for cut in (True,) if size > 1 else (False, True):
        model: Any = AutoModelForCausalLM.from_config(config()).to(DEVICE).train()
        model.gradient_checkpointing_enable()
        parallel = context_parallel(model, dist.group.WORLD) if cut else None
        row["parameters"] = float(sum(p.numel() for p in model.parameters()))
        for tokens in lengths:
            name = f"{tokens} {'cut' if cut else 'alone'}"
            try:
                row |= {f"{name} {of}": number for of, number in _steps(model, parallel, tokens).items()}
            except Exception as error:
                row[f"{name} failed"] = f"{type(error).__name__}: {error}"[:500]
    return row


def _steps(model: Any, parallel: Any, tokens: int) -> dict[str, float]:
    """The fastest of at most four steps in ten seconds; of ranks that share the GPU one, for its memory."""
    ids_BL = torch.randint(0, 60, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    batch: dict[str, Any] = {"input_ids": ids_BL, "labels": ids_BL}
    batch = parallel.shard(batch) if parallel else batch
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken: list[float] = []
    while len(taken) < (2 if dist.get_world_size() == 1 else 1) or (1 < len(taken) < 4 and sum(taken) < 10):
        dist.barrier()
        began = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        if parallel:
            parallel.sum_gradients()
        loss.item()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
        model.zero_grad()
    peak = torch.cuda.max_memory_allocated() / (1 << 20) if DEVICE == "cuda" else 0.0
    return {"tokens/s": tokens / min(taken), "peak MiB": peak, "loss": loss.item()}


def _config(kind: str, parameters: str) -> Any:
    """A configuration without experts of about so many."""
    size, layers, heads, dim = SIZES[parameters]
    if kind == "mamba2":
        return Mamba2Config(
            vocab_size=8_192, hidden_size=size, num_hidden_layers=2 * layers, num_heads=2 * size // dim, head_dim=dim,
            state_size=2 * dim, n_groups=1, chunk_size=64,
        )  # fmt: skip
    return Qwen3NextConfig(
        vocab_size=8_192, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=layers, head_dim=dim,
        num_attention_heads=heads, num_key_value_heads=heads // 2, linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads, linear_key_head_dim=dim, linear_value_head_dim=dim, num_experts=0,
        mlp_only_layers=list(range(layers)),
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
    )  # fmt: skip


def _over(backend: str, ranks: int, work: Callable[[int, int], Any]) -> list[Any]:
    """What each of so many processes returned that share the device."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as pool:
        store = (Path(folder) / "store").as_uri()
        return pool.starmap(_on_rank, [(backend, rank, ranks, store, work) for rank in range(ranks)], chunksize=1)


def _on_rank(backend: str, rank: int, size: int, store: str, work: Callable[[int, int], Any]) -> Any:
    carrier = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    _hide_fla()
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    with TorchDistCommunicator.connect(
        backend, timeout_s=TIMEOUT_S, device=carrier, meeting=store, rank=rank, size=size
    ):
        return work(rank, size)


def _hide_fla() -> None:
    """Keep transformers from flash-linear-attention's kernels: it takes them for tensors of a CPU too."""
    sys.modules["fla"] = None  # type: ignore[assignment]  # which is how Python marks what is not to be had

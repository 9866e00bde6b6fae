"""Downloaded models against llama.cpp on a processor: decoding and prefill of the same random weights, in turns."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoding_forms import StateForm
from benchmarks.measured import Measured, Panel, Table
from benchmarks.peers import absent
from benchmarks.setting import look_around
from benchmarks.timing import Times
from dist_attn.adapters.model import AdaptedModel
from dist_attn.errors import ConfigError
from dist_attn.generation.decode import prefill
from dist_attn_research.studies.gguf_models import write_gguf
from dist_attn_research.studies.llama_cpp import LlamaCpp

__all__ = ["NAME", "PEERS", "QUESTION", "TESTS", "TINY", "adapted", "measure", "random_model"]

NAME = "peers-cpu"
QUESTION = (
    "How fast are downloaded models of 100M parameters, mamba2 and qwen3_next, on a processor, against llama.cpp with "
    "the same random weights, bits and threads? Steps of 1 and 16 sequences, and a prompt of 2,048 tokens."
)
TESTS = ("research/tests/test_peers_cpu.py",)
PEERS = ("llama.cpp", "gguf")
OURS, THEIRS = "ours", "llama.cpp"
BATCHES, LENGTH, STEPS, ROUNDS = (1, 16), 2_048, 8, 5

_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False}
_MAMBA2 = {"conv_kernel": 4, "expand": 2, "n_groups": 1, "use_bias": False, **_TOKENS}
_QWEN3_NEXT = {
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 65_536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    **_TOKENS,
}
Shapes = Mapping[str, Mapping[str, Any]]
"""Settings of config.json by model_type."""

TINY: Shapes = {
    "mamba2": {
        **_MAMBA2, "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 32,
        "state_size": 32,
    },
    "qwen3_next": {
        **_QWEN3_NEXT, "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 64,
    },
}  # fmt: skip
SHAPES: Shapes = {
    "mamba2": {
        **_MAMBA2, "vocab_size": 16_384, "hidden_size": 768, "num_hidden_layers": 20, "num_heads": 24, "head_dim": 64,
        "state_size": 128,
    },
    "qwen3_next": {
        **_QWEN3_NEXT, "vocab_size": 16_384, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 24, "num_experts_per_tok": 4,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "intermediate_size": 512,
    },
}  # fmt: skip

NOTES = (
    "Ours: seconds around prefill and steps, tokens chosen greedily; llama.cpp: seconds that its server counts itself, "
    "greedy too, its cache of keys and values as it comes, in float16. Steps follow a prompt of one token. Medians of "
    "rounds in turns.",
    "llama.cpp is the wheel xllamacpp from PyPI, built for AVX2; on a processor with more, its own build is faster.",
)


def measure(smoke: bool) -> Measured:
    """Each shape with every work of ours and theirs in turns.

    Raises: ConfigError where llama.cpp is not installed: there is nothing to compare with.
    """
    missing = absent(*PEERS)
    if missing:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    setting = look_around()
    shapes, length = (TINY, 64) if smoke else (SHAPES, LENGTH)
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    tables: list[Table] = []
    for kind, shape in shapes.items():
        model = random_model(kind, shape)
        works = _works(model, length)
        times = _in_turns(works, 1 if smoke else ROUNDS)
        numbers[f"{kind}, parameters"] = sum(p.numel() for p in model.parameters())
        numbers |= {f"{kind}, {who}, {what}, seconds": one.median for (what, who), one in times.items()}
        rows = []
        for what in dict.fromkeys(what for what, _ in works):
            ours, theirs = times[what, OURS], times[what, THEIRS]
            ratios[f"{kind}, {what}, llama.cpp / ours"] = round(theirs.median / ours.median, 3)
            cells = (f"{1e3 * one.median:,.1f} ms" for one in (ours, theirs))
            spread = max(ours.spread, theirs.spread)
            rows.append((what, *cells, f"{theirs.median / ours.median:.2f}x", f"{spread:.0%}"))
        title = f"{kind}, {numbers[f'{kind}, parameters'] / 1e6:,.0f}M parameters, float32"
        tables.append(Table(title, ("work", OURS, THEIRS, "llama.cpp / ours", "spread"), tuple(rows)))
    curves = {
        f"{kind}, {who}": {float(n): n / numbers[f"{kind}, {who}, {_step(n)}, seconds"] for n in BATCHES}
        for kind in shapes
        for who in (OURS, THEIRS)
    }
    panel = Panel("tokens a second by batch", "batch", "tokens/s", curves)
    return Measured(NAME, QUESTION, setting, tuple(tables), ratios, numbers, (panel,), NOTES, missing, not smoke)


def random_model(kind: str, settings: Mapping[str, Any]) -> Any:
    """A model of transformers with random weights that matter: its norms and biases are no constants."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "conv" not in name:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn(weight.shape))
    return model


def adapted(model: Any) -> AdaptedModel:
    """The same modules over operations of ours."""
    from dist_attn.adapters.binding import ATTENTION

    model.set_attn_implementation(ATTENTION)
    return AdaptedModel(model)


Work = tuple[str, str]
"""What is done, and by whom."""


def _step(batch: int) -> str:
    return f"a step of {batch}"


def _works(model: Any, length: int) -> dict[Work, Callable[[], float]]:
    """Each gives its seconds. The file is gone when this returns: what serves it has read it."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path, "float32")
        servers = {n: LlamaCpp(path, slots=n, tokens=max(256, 2 * length // n), threads=threads) for n in BATCHES}
    ours = adapted(model)
    prompt_L = torch.randint(ours.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    prompt = prompt_L.tolist()
    works: dict[Work, Callable[[], float]] = {}
    for batch, server in servers.items():
        works[_step(batch), OURS] = lambda batch=batch: _seconds_a_step(ours, batch)  # type: ignore[misc]
        works[_step(batch), THEIRS] = lambda server=server: server.step_s(STEPS + 1)  # type: ignore[misc]
    what = f"a prompt of {length:,}"
    works[what, OURS] = lambda: _timed(lambda: prefill(ours, prompt_L))
    works[what, THEIRS] = lambda: servers[1].prefill_s(prompt)
    return works


def _seconds_a_step(model: AdaptedModel, batch: int) -> float:
    form = StateForm(model, batch, 1)
    return _timed(form.steps(STEPS)) / STEPS


def _timed(work: Callable[[], object]) -> float:
    with torch.inference_mode():
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def _in_turns(works: Mapping[Work, Callable[[], float]], rounds: int) -> dict[Work, Times]:
    """Every work once uncounted, then so many times in turns."""
    taken: dict[Work, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = work()
            if number:
                taken[name].append(seconds)
    return {name: Times(tuple(seconds)) for name, seconds in taken.items()}

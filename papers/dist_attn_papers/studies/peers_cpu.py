"""Downloaded models against llama.cpp on a processor: decoding and prefill of the same random weights, in turns."""

import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import Found, Panel, Table
from benchmarks.peers import require
from benchmarks.rank_passes import on_ranks
from benchmarks.setting import own_cores
from benchmarks.timing import LEAST_ROUNDS, Times, interleaved
from dist_attn.comm import Communicator
from dist_attn.generation.decode import prefill
from dist_attn.layout import SequenceLayout
from dist_attn.model_config.figures import GRAIN
from dist_attn.models import CausalModel
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.studies.decoding_forms import StateForm
from dist_attn_papers.studies.gguf_models import write_gguf
from dist_attn_papers.studies.llama_cpp import LlamaCpp

__all__ = [
    "NAME", "OURS", "PEERS", "QUESTION", "SHAPES", "TESTS", "THEIRS", "TINY", "adapted", "measure", "prompt",
    "prompt_works", "random_model", "serve", "size_of",
]  # fmt: skip

NAME = "peers-cpu"
QUESTION = (
    "How fast are downloaded models of 100M and 1B parameters, mamba2 and qwen3_next, on a processor, against "
    "llama.cpp with the same random weights, bits and threads? Steps of 1 and 16 sequences, a prompt of 2,048 tokens; "
    "and how much faster is one of 4,096 on two ranks than on one?"
)
TESTS = ("papers/tests/test_peers_cpu.py",)
PEERS = ("llama.cpp", "gguf")
OURS, THEIRS = "ours", "llama.cpp"
BATCHES, LENGTH, OVER_RANKS, STEPS, ROUNDS = (1, 16), 2_048, 4_096, 8, 5
MANY = 1e12
"""Parameters times tokens: prompts of more are read once."""

_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False}
_MAMBA2 = {"conv_kernel": 4, "expand": 2, "n_groups": 1, "use_bias": False, **_TOKENS}
_QWEN3_NEXT = {
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 65_536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    **_TOKENS,
}
Shapes = Mapping[str, Mapping[str, Any]]
"""Settings of config.json by model_type, and what more there is to say of them."""

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
    "mamba2 1B": {
        **_MAMBA2, "vocab_size": 32_768, "hidden_size": 2_048, "num_hidden_layers": 36, "num_heads": 64, "head_dim": 64,
        "state_size": 128,
    },
    "qwen3_next 1B": {
        **_QWEN3_NEXT, "vocab_size": 32_768, "hidden_size": 1_024, "num_hidden_layers": 16, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 64, "num_experts_per_tok": 4,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "intermediate_size": 1_024,
    },
}  # fmt: skip

NOTES = (
    "Ours: seconds around prefill and steps, tokens chosen greedily; llama.cpp: seconds that its server counts itself, "
    "greedy too, its cache of keys and values as it comes, in float16. Steps follow a prompt of one token. Medians of "
    "rounds in turns; prompts on one rank of more than 1e12 parameters times tokens once. Prompts of 32,768: "
    "peers-cpu-long.",
    "1B: layers, heads and experts as wide to each other as in mamba2-1.3b and Qwen3-Next-80B, and fewer of them.",
    "Two ranks: processes over gloo, a thread and a core each, a block of 512 tokens each at a time. In each of "
    "three rounds the first rank reads alone, then each reads the whole prompt by itself, at the same time, without a "
    "message: what two cores of this machine allow; then both read it together. Medians.",
    "llama.cpp is the wheel xllamacpp from PyPI, built for AVX2; on a processor with more, its own build is faster.",
)


def measure(smoke: bool) -> Found:
    """Each shape with every work of ours and theirs in turns.

    Raises: ConfigError where llama.cpp is not installed: there is nothing to compare with.
    """
    require(*PEERS)
    shapes, length, longer, rounds = (TINY, 64, 64, 1) if smoke else (SHAPES, LENGTH, OVER_RANKS, ROUNDS)
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    tables: list[Table] = []
    over_ranks: list[tuple[str, ...]] = []
    for name, shape in shapes.items():
        size = size_of(name, shape)
        of_ranks = on_ranks(partial(_on_rank, name=name, shape=shape, length=longer), 2)
        alone, copies, both = map(max, zip(*of_ranks, strict=True))
        works = _works(random_model(name, shape), length)
        times = _in_turns(works, rounds, [prompt(length)] if size * length > MANY else [])
        del works  # with it a server's copy of the weights
        numbers[f"{name}, parameters"] = size
        numbers |= {f"{name}, {who}, {what}, seconds": one.median for (what, who), one in times.items()}
        numbers |= {f"{name}, 1 rank, seconds": alone, f"{name}, 2 ranks, seconds": both}
        numbers[f"{name}, a prompt on each of 2 ranks, seconds"] = copies
        ratios[f"{name}, {prompt(longer)}, 1 rank / 2 ranks"] = round(alone / both, 3)
        cells = (
            f"{alone:.1f} s",
            f"{both:.1f} s",
            f"{alone / both:.2f}x",
            f"{copies:.1f} s",
            f"{2 * alone / copies:.2f}x",
        )
        over_ranks.append((name, prompt(longer), *cells))
        rows = []
        for what in dict.fromkeys(what for what, _ in times):
            ours, theirs = times[what, OURS], times[what, THEIRS]
            ratios[f"{name}, {what}, llama.cpp / ours"] = round(theirs.median / ours.median, 3)
            both_ms = (f"{1e3 * one.median:,.1f} ms" for one in (ours, theirs))
            spread = max(ours.spread, theirs.spread)
            rows.append((what, *both_ms, f"{theirs.median / ours.median:.2f}x", f"{spread:.0%}"))
        title = f"{name}, {size / 1e6:,.0f}M parameters, float32"
        tables.append(Table(title, ("work", OURS, THEIRS, "llama.cpp / ours", "spread"), tuple(rows)))
    columns = ("model", "work", "1 rank", "2 ranks", "faster", "a prompt on each of 2", "what two cores allow")
    tables.append(Table("Two ranks", columns, tuple(over_ranks)))
    curves = {
        f"{name}, {who}": {float(n): n / numbers[f"{name}, {who}, {_step(n)}, seconds"] for n in BATCHES}
        for name in shapes
        for who in (OURS, THEIRS)
    }
    panel = Panel("tokens a second by batch", "batch", "tokens/s", curves)
    notes = NOTES if len(own_cores()) > 1 else (*NOTES, "This process may use one core only: both ranks shared it.")
    return Found(tuple(tables), ratios, numbers, (panel,), notes)


def size_of(name: str, shape: Mapping[str, Any]) -> int:
    """How many parameters a model of this shape has."""
    with torch.device("meta"):
        return sum(p.numel() for p in random_model(name, shape).parameters())


def random_model(name: str, settings: Mapping[str, Any]) -> Any:
    """A model of transformers with random weights that matter: its norms and biases are no constants."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.split()[0], **settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "conv" not in name:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn(weight.shape))
    return model


def adapted(model: Any) -> CausalModel:
    """The same modules over operations of ours."""
    from dist_attn.adapters.binding import ATTENTION
    from dist_attn.adapters.model import AdaptedModel

    model.set_attn_implementation(ATTENTION)
    return AdaptedModel(model)


Work = tuple[str, str]
"""What is done, and by whom."""


def _step(batch: int) -> str:
    return f"a step of {batch}"


def prompt(length: int) -> str:
    """What reading a prompt is called."""
    return f"a prompt of {length:,}"


def _works(model: Any, length: int) -> dict[Work, Callable[[], float]]:
    """Each gives its seconds."""
    servers = serve(model, {n: 256 if n > 1 else length + 256 for n in BATCHES})
    ours = adapted(model)
    works: dict[Work, Callable[[], float]] = {}
    for batch, server in servers.items():
        works[_step(batch), OURS] = partial(_seconds_a_step, ours, batch)
        works[_step(batch), THEIRS] = partial(server.step_s, STEPS + 1)
    return works | prompt_works(ours, servers[1], length)


def serve(model: Any, rooms: Mapping[int, int]) -> dict[int, LlamaCpp]:
    """The same weights served by llama.cpp for so many sequences, each with room for so many tokens."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:  # gone when this returns: what serves the file has read it
        path = Path(folder) / "model.gguf"
        write_gguf(model, path, "float32")
        return {n: LlamaCpp(path, slots=n, tokens=room, threads=threads) for n, room in rooms.items()}


def prompt_works(ours: CausalModel, theirs: LlamaCpp, length: int) -> dict[Work, Callable[[], float]]:
    """Reading a prompt: each gives its seconds."""
    prompt_L = _random_tokens(ours, length)
    return {
        (prompt(length), OURS): partial(_timed, partial(prefill, ours, prompt_L)),
        (prompt(length), THEIRS): partial(theirs.prefill_s, prompt_L.tolist()),
    }


def _random_tokens(model: CausalModel, length: int) -> torch.Tensor:
    return torch.randint(model.vocab_size, (length,), generator=torch.Generator().manual_seed(0))


def _on_rank(comm: Communicator, name: str, shape: Mapping[str, Any], length: int) -> tuple[float, ...]:
    """Median seconds for a prompt read by the first rank alone, by every rank by itself, and by all together."""
    model = adapted(random_model(name, shape))
    prompt_L = _random_tokens(model, length)

    def copies() -> None:
        prefill(model, prompt_L)
        comm.barrier()

    def alone() -> None:
        if comm.rank == 0:
            prefill(model, prompt_L)
        comm.barrier()

    def together() -> None:
        state = model.initial_state(1)
        for block_L in prompt_L.split(GRAIN * comm.size):
            layout = SequenceLayout.even(len(block_L), comm.size)
            own_L = block_L[slice(*layout.range(comm.rank))]
            _, state = model.hidden(own_L[None], ShardedSequenceOps(comm, layout), state)
        comm.barrier()

    with torch.inference_mode():
        times = interleaved({"alone": alone, "copies": copies, "together": together}, LEAST_ROUNDS)
    return tuple(one.median for one in times.values())


def _seconds_a_step(model: CausalModel, batch: int) -> float:
    form = StateForm(model, batch, 1)
    return _timed(form.steps(STEPS)) / STEPS


def _timed(work: Callable[[], object]) -> float:
    with torch.inference_mode():
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def _in_turns(works: Mapping[Work, Callable[[], float]], rounds: int, once: Collection[str]) -> dict[Work, Times]:
    """Every work once uncounted, then so many times in turns; what is named in `once` a single time, which counts."""
    taken: dict[Work, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            if name[0] in once:
                taken[name] = taken[name] or [work()]
                continue
            seconds = work()
            if number:
                taken[name].append(seconds)
    return {name: Times(tuple(seconds)) for name, seconds in taken.items()}

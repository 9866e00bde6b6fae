"""Models of transformers of every supported type with random weights, and how far ours are from them.

Shape letters: B batch, L tokens, D model width, V vocabulary.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from dist_attn.adapters.model import AdaptedModel, load_adapted_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.generation import pack_state, restore_state
from dist_attn.layout import SequenceLayout
from dist_attn.models import ModelState
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.wire.snapshot import read_snapshot
from tests.support.ranks import forkserver
from tests.support.snapshots import manifest

__all__ = [
    "BLOCK", "TYPES", "VOCABULARY", "WAYS", "Compared", "after_a_block", "auto_class", "compared", "distances",
    "forked", "restored_elsewhere", "with_heads", "written",
]  # fmt: skip

LENGTH, BLOCK, VOCABULARY = 61, 37, 97
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
KINDS_OF_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HEADS = SIZES | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LATENT = HEADS | KINDS_OF_LAYERS | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": 16, "num_experts": 8,
}  # fmt: skip
DELTA = HEADS | KINDS_OF_LAYERS | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
SEEING = {
    "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 32,
    "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14,
}  # fmt: skip
WINDOWS = HEADS | {"num_hidden_layers": 6, "sliding_window": 16}
MAMBA2 = HEADS | {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32,
}  # fmt: skip

TYPES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5": {"text_config": DELTA, "vision_config": SEEING},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe": {"text_config": DELTA | EXPERTS, "vision_config": SEEING},
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "kimi_linear": LATENT | {"linear_head_dim": 8, "linear_num_heads": 4},
    "mamba2": SIZES | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 32},
    "nemotron_h": HEADS
    | {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": 4,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "minimax": HEADS | KINDS_OF_LAYERS | {"block_size": 16},
    "falcon_h1": MAMBA2
    | {
        "mamba_d_ssm": 64, "num_hidden_layers": 2, "embedding_multiplier": 5.6, "lm_head_multiplier": 0.4,
        "key_multiplier": 0.4, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.25,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.7], "mlp_multipliers": [0.9, 0.18],
    },
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA2
    | KINDS_OF_LAYERS
    | {
        "shared_intermediate_size": 32,
        "embedding_multiplier": 12.0, "logits_scaling": 2.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
    },
    "olmo_hybrid": DELTA | {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    "bailing_hybrid": LATENT
    | {
        "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "zamba2": SIZES
    | {
        "mamba_d_state": 16, "n_mamba_heads": 8, "num_attention_heads": 4, "num_mem_blocks": 2, "use_mem_rope": True,
        "use_shared_attention_adapter": True, "adapter_rank": 4, "chunk_size": 32,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
    },
    "recurrent_gemma": HEADS | {"lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 16},
    "mamba": SIZES | {"num_hidden_layers": 2},
    "falcon_mamba": SIZES | {"num_hidden_layers": 2},
    "jamba": HEADS | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "xlstm": SIZES | {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "max_inference_chunksize": 32},
    "lfm2": HEADS | {"layer_types": ["conv", "full_attention", "conv"]},
    "llama": HEADS
    | {
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "qwen3": HEADS | {"num_hidden_layers": 2},
    "gemma3": {"text_config": WINDOWS, "vision_config": SEEING},
    "gemma3_text": WINDOWS,
    "mistral": HEADS | {"num_hidden_layers": 2, "sliding_window": 16},
    "gemma2": HEADS | {"num_hidden_layers": 2, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "gpt_neox": SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
}  # fmt: skip
"""By type: what is smaller than in transformers' own configuration of it, and multipliers that its folders have."""


_HEADS = (
    "num_attention_heads", "num_key_value_heads", "num_heads", "linear_num_heads", "linear_num_value_heads",
    "linear_num_key_heads", "mamba_num_heads", "mamba_n_heads", "n_mamba_heads",
)  # fmt: skip
_ONE = ("expand", "mamba_expand", "n_groups", "mamba_n_groups", "mamba_ngroups")


def with_heads(kind: str, heads: int) -> dict[str, Any]:
    """What makes a model of this type have so many heads of each sort; a configuration takes of it what it knows."""
    wide = dict.fromkeys(("hidden_size", "lru_width", "mamba_d_ssm"), 8 * heads) | {"intermediate_size": 9 * heads}
    sizes = dict.fromkeys(_HEADS, heads) | dict.fromkeys(_ONE, 1) | wide
    inner = TYPES[kind].get("text_config")
    return sizes if inner is None else {"text_config": inner | sizes}


@dataclass(frozen=True)
class Compared:
    """Ours as loaded from `folder`, tokens of two texts that differ in the first, and the logits of transformers."""

    folder: Path
    ours: AdaptedModel
    tokens_BL: Tensor
    want_BLV: Tensor


@cache
def compared(kind: str) -> Compared:
    """The comparison of this type, made once."""
    theirs, tokens_BL = written(kind)
    folder = Path(_folders().name) / kind
    theirs.save_pretrained(folder)
    with torch.no_grad():
        return Compared(folder, load_adapted_model(folder), tokens_BL, _logits(theirs, tokens_BL))


@cache
def _folders() -> "TemporaryDirectory[str]":
    """Where this process keeps folders of models until it ends."""
    return TemporaryDirectory(prefix="foreign-models-")


def auto_class(config: Any) -> Any:
    """transformers' class for models of such a configuration: those that see have another one."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def written(kind: str, seed: int = 0, **options: Any) -> tuple[Any, Tensor]:
    """transformers' own model, every parameter of it random and large enough to matter, and tokens for it."""
    config = CONFIG_MAPPING[kind](**TYPES[kind] | options)
    torch.manual_seed(seed)
    theirs = auto_class(config).from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() > 1 and not name.endswith("A_log"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith("dt_bias"):  # memories of some to some hundred tokens, as in trained models
                parameter.normal_(mean=-4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tokens_BL = torch.randint(3, VOCABULARY, (1, LENGTH)).repeat(2, 1)
    tokens_BL[1, 0] = 2
    return theirs.eval(), tokens_BL


def _logits(theirs: Any, tokens_BL: Tensor) -> Tensor:
    # Hidden states are asked for because xLSTM then takes the text as a whole, and not with a state in bfloat16.
    logits_BLV: Tensor = theirs(tokens_BL, use_cache=False, output_hidden_states=True).logits
    return logits_BLV


WAYS = ("whole", "blocks of 37", "steps", "1 rank", "2 ranks", "4 ranks")


def distances(case: Compared) -> Iterator[float]:
    """The largest difference of logits in each of the `WAYS`; four ranks take the text in two blocks."""
    for read in (
        _blocks(case, LENGTH),
        _blocks(case, BLOCK),
        _steps(case),
        _ranks(case, [LENGTH]),
        _ranks(case, [20, 41]),
        _ranks(case, [1, 20, 0, 16], [0, 10, 14, 0]),
    ):
        yield (read - case.want_BLV).abs().max().item()


def _blocks(case: Compared, length: int) -> Tensor:
    state, read = None, []
    with torch.no_grad():
        for block_BL in case.tokens_BL.split(length, dim=1):
            h_BLD, state = case.ours.hidden(block_BL, None, state)
            read.append(case.ours.readout(h_BLD))
    return torch.cat(read, dim=1)


def _steps(case: Compared) -> Tensor:
    state, read = case.ours.initial_state(2), []
    with torch.no_grad():
        for token_B in case.tokens_BL.unbind(1):
            logits_BV, state = case.ours.step(token_B, state)
            read.append(logits_BV)
    return torch.stack(read, dim=1)


def _ranks(case: Compared, *blocks: list[int]) -> Tensor:
    """Blocks of so many tokens on each rank, one after the other."""

    def read(comm: Communicator) -> list[Tensor]:
        state: ModelState | None = None
        read, begin = [], 0
        with torch.no_grad():
            for lengths in blocks:
                layout = SequenceLayout.from_lengths(lengths)
                own = slice(*(begin + end for end in layout.range(comm.rank)))
                h_BLD, state = case.ours.hidden(case.tokens_BL[:, own], ShardedSequenceOps(comm, layout), state)
                read.append(case.ours.readout(h_BLD))
                begin += layout.total
        return read

    ranks = run_simulated(read, len(blocks[0]))
    return torch.cat([part for block in zip(*ranks, strict=True) for part in block], dim=1)


def after_a_block(case: Compared) -> ModelState:
    """The state of both texts after their first block."""
    return case.ours.hidden(case.tokens_BL[:, :BLOCK])[1]


@torch.inference_mode()
def forked(case: Compared) -> Tensor:
    """Logits after the first block, of forks of its state that go on side by side; the second follows a third fork."""
    state = after_a_block(case)
    forks = ModelState.stack([state.select(1), state.select(0), state.select(1)])
    tokens_BL = case.tokens_BL[[1, 0, 1]]
    logits_BV, after = case.ours.step(tokens_BL[:, BLOCK], forks)
    case.ours.step(tokens_BL[:, BLOCK] - 1, forks)
    h_BLD, _ = case.ours.hidden(tokens_BL[:, BLOCK + 1 :], None, after)
    return torch.cat([logits_BV[:, None], case.ours.readout(h_BLD)], dim=1)[[1, 2]]


@cache
@torch.inference_mode()
def restored_elsewhere() -> dict[str, Tensor]:
    """Hidden states of the first text after its first block, of every type, from a snapshot in a new process."""
    folders = []
    for case in map(compared, TYPES):
        described = manifest(mixers=case.ours.kinds)
        packed = pack_state(after_a_block(case).select(0), described)
        (case.folder / "state").write_bytes(b"".join(packed.pieces()))
        torch.save(case.tokens_BL[:1, BLOCK:], case.folder / "tokens")
        folders.append(case.folder)
    process = forkserver().Process(target=_go_on, args=(folders,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return {folder.name: torch.load(folder / "hidden") for folder in folders}


@torch.inference_mode()
def _go_on(folders: list[Path]) -> None:
    for folder in folders:
        model = load_adapted_model(folder)
        snapshot = read_snapshot(io.BytesIO((folder / "state").read_bytes()))
        state = restore_state(snapshot, model, manifest(mixers=model.kinds)).state
        torch.save(model.hidden(torch.load(folder / "tokens"), None, state)[0], folder / "hidden")

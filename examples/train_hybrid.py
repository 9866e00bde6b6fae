"""Train a hybrid model of transformers on texts that are cut over ranks: here two CPUs, on GPUs the same.

    torchrun --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 examples/train_hybrid.py

Without --folder it makes a small Qwen3-Next (gated delta rules and attention) with random weights. The text is that of
--text, as bytes. The folder that it writes is one of transformers, which `dist-attn serve --model` takes too.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3NextConfig
from transformers.utils import logging

from dist_attn import context_parallel

SMALL = Qwen3NextConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16, num_attention_heads=4,
    num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
    shared_expert_intermediate_size=64, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip


def load(folder: Path | None) -> PreTrainedModel:
    """The model of a folder, or a small one with random weights, the same on every rank."""
    torch.manual_seed(0)
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(SMALL)


def main() -> None:
    """Train, say how it goes, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder of transformers to begin with")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on, read as bytes")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text, over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("trained-hybrid"))
    given = parser.parse_args()
    logging.set_verbosity_error()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    model = load(given.folder).to(device).train()
    parallel = context_parallel(model, dist.group.WORLD)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

    text = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8).long().to(device)
    draw = torch.Generator().manual_seed(1)
    for step in range(given.steps):
        start = int(torch.randint(max(1, len(text) - given.length), (), generator=draw))
        tokens = text[start : start + given.length][None]
        loss = model(**parallel.shard({"input_ids": tokens, "labels": tokens})).loss  # of the whole text, on every rank
        loss.backward()
        parallel.sum_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {tokens.shape[1]} tokens on {dist.get_world_size()} ranks")
    parallel.release()
    if rank == 0:
        model.save_pretrained(given.out)
        print(f"wrote {given.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Long DNA-like sequences: a small model learns what genes look like and then reads a million bases in one stream.

    python examples/long_dna.py --bases 1000000

The genome is made up: stretches of evenly drawn bases, 2 bits each, and between them "genes", whose triplets come from
a few codons only and which cost a model that has learned them less. Nobody tells it where genes are: it reads base by
base, with a state of one size, and its surprise shows them. No service is needed, and memory does not grow with the
genome but for the numbers that are printed.
"""

import argparse
import math
import sys
import time

import torch

from dist_attn.errors import DistAttnError
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model

BASES = "ACGT"
GENE = 1500  # bases; as long as what lies between two of them
BLOCK = 4096  # bases read at a time
WINDOW = 500  # bases over which surprise is averaged


def main() -> None:
    """Train, read, compare surprise inside and outside of genes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", type=int, default=1_000_000, help="length of the genome that is read")
    parser.add_argument("--steps", type=int, default=150, help="steps of training, each on 8 rows of 512 bases")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    codons_N3 = torch.randint(0, 4, (8, 3), generator=generator)  # the only triplets of genes
    model = trained(codons_N3, options.steps, generator)

    genome_L, is_gene_L = genome(options.bases, codons_N3, generator)
    started = time.perf_counter()
    bits_L, state_bytes = surprise(model, genome_L)
    seconds = time.perf_counter() - started
    print(f"{options.bases:,} bases in {seconds:.1f} s, with a state of {state_bytes:,} bytes")
    print(f"bits per base: {bits_L[is_gene_L].mean():.3f} in genes, {bits_L[~is_gene_L].mean():.3f} between them")

    windows = len(bits_L) // WINDOW
    found_N = bits_L[: windows * WINDOW].view(windows, WINDOW).mean(1)
    truth_N = is_gene_L[: windows * WINDOW].view(windows, WINDOW).float().mean(1)
    pure_N = (truth_N == 0) | (truth_N == 1)  # windows that lie in a gene or between genes as a whole
    middle = (found_N.min() + found_N.max()) / 2
    right = ((found_N < middle) == (truth_N == 1))[pure_N].float().mean().item() if bool(pure_N.any()) else math.nan
    print(f"windows of {WINDOW} bases told apart by their surprise alone: {100 * right:.1f} %")
    line = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * value / 2.2))] for value in found_N[:100].tolist())
    print(f"the first {min(windows, 100)} windows, low where genes are:\n{line}")


def genome(bases: int, codons_N3: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Bases 0 to 3 and where genes are, [L] each: a stretch without and a gene, in turns."""
    parts, marks, length = [], [], 0
    while length < bases:
        parts.append(torch.randint(0, 4, (GENE,), generator=generator))
        drawn = torch.randint(0, len(codons_N3), (GENE // 3,), generator=generator)
        parts.append(codons_N3[drawn].flatten())
        marks += [torch.zeros(GENE, dtype=torch.bool), torch.ones(GENE, dtype=torch.bool)]
        length += 2 * GENE
    return torch.cat(parts)[:bases], torch.cat(marks)[:bases]


def trained(codons_N3: torch.Tensor, steps: int, generator: torch.Generator) -> LanguageModel:
    """A model of two layers with gates, trained on rows of other genomes with the same codons."""
    mixer = {"kind": "rfa_gate", "hidden_size": 64, "num_heads": 2, "num_random": 32, "short_convolution": 4}
    config = {"vocab_size": 4, "hidden_size": 64, "num_layers": 2, "mlp_size": 128, "mixer": mixer}
    model = build_model(LanguageModelConfig.model_validate(config))
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    stream_L, _ = genome(8 * 512 * max(steps, 1), codons_N3, generator)
    rows_SBL = stream_L.view(-1, 512)[torch.randperm(8 * max(steps, 1), generator=generator)].view(-1, 8, 512)
    for step in range(steps):
        logits_BLV, _ = model(rows_SBL[step, :, :-1])
        loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), rows_SBL[step, :, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step + 1}: {loss.item() / math.log(2):.3f} bits per base", flush=True)
    return model.eval()


@torch.inference_mode()
def surprise(model: LanguageModel, genome_L: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Bits of every base given all before it, and the bytes of the state that was carried."""
    state = model.initial_state(1)
    bits = [torch.full((1,), 2.0)]  # the first base: one of four
    for start in range(0, len(genome_L) - 1, BLOCK):
        inputs_L, targets_L = genome_L[start : start + BLOCK], genome_L[start + 1 : start + 1 + BLOCK]
        logits_BLV, state = model(inputs_L[None, : len(targets_L)], state=state)
        nats_L = torch.nn.functional.cross_entropy(logits_BLV[0], targets_L, reduction="none")
        bits.append(nats_L / math.log(2))
    return torch.cat(bits), state.num_bytes()


if __name__ == "__main__":
    try:
        main()
    except DistAttnError as error:
        sys.exit(f"long_dna: {error}")

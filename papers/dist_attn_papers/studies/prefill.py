"""How much of the machine's matmul rate a whole model reaches when it reads a prompt."""

from collections.abc import Callable

import torch

from benchmarks.measured import Found, Panel, Table
from benchmarks.peers import absent
from benchmarks.timing import RATES, Roofline, interleaved, rate_works
from dist_attn.models import LanguageModel
from dist_attn.ops import LocalSequenceOps
from dist_attn_papers.studies.decoding_forms import Sizes, gpt2, language_model

__all__ = ["NAME", "QUESTION", "TESTS", "measure", "prefill_costs"]

NAME = "prefill"
QUESTION = (
    "At what share of the machine's own matmul rate does a model read a prompt? 6 layers, 512 wide, 8 heads of 64, MLP "
    "2,048, 64 random vectors, float32, batch 1, hidden states without a read-out."
)
TESTS = ("tests/models/test_language_model.py", "tests/costs/test_models.py")
LENGTHS, BLOCKS, ROUNDS = (2_048, 8_192), (512, 2_048), 5
SMOKE_SIZES, SMOKE_LENGTHS, SMOKE_BLOCKS = Sizes(32, 2, 2, 64, 64), (32,), (8, 16)


def measure(smoke: bool) -> Found:
    """Read in blocks of two sizes; GPT-2 of the same size reads all at once, into its cache."""
    sizes, lengths, blocks = (SMOKE_SIZES, SMOKE_LENGTHS, SMOKE_BLOCKS) if smoke else (Sizes(), LENGTHS, BLOCKS)
    model, rows, notes = language_model(sizes), [], []
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    curves: dict[str, dict[float, float]] = {}
    for length in lengths:
        works = _works(model, sizes, length, blocks)
        times = interleaved({**works, **rate_works()}, 1 if smoke else ROUNDS)
        seconds = {name: one.median for name, one in times.items() if name not in RATES}
        roof, (flops, moved) = Roofline.of(times), prefill_costs(sizes, length)
        best = min((name for name in seconds if name.startswith("ours")), key=seconds.__getitem__)
        ratios[f"share of the matmul rate at {length}"] = round(flops / seconds[best] / roof.flops_per_s, 4)
        for name, value in seconds.items():
            share = flops / value / roof.flops_per_s
            told = f"{share:.0%}" if name.startswith("ours") else "–"
            rows.append((f"{length:,}", name, f"{1e3 * value:,.1f} ms", f"{length / value:,.0f}", told))
            numbers[f"{name}, seconds at {length}"] = value
            curves.setdefault(name, {})[float(length)] = length / value
        if "gpt2" in seconds:
            ratios[f"gpt2 / ours at {length}"] = round(seconds["gpt2"] / seconds[best], 3)
        notes.append(roof.line(f"{length:,} tokens", flops, moved, seconds[best]))
    notes.append("The share is of the operations that our form needs; GPT-2 needs others, so its time is compared.")
    columns = ("tokens", "form", "time", "tokens/s", "of the matmul rate")
    table = Table("Reading a prompt, medians of rounds taken in turns", columns, tuple(rows))
    panel = Panel("tokens a second", "tokens", "tokens/s", curves)
    return Found((table,), ratios, numbers, (panel,), tuple(notes), absent("transformers"))


def prefill_costs(sizes: Sizes, length: int) -> tuple[float, float]:
    """Operations, and bytes at the least: all weights but the embedding's other rows once, hidden states written."""
    costs = sizes.costs
    weights = costs.weights_bytes - 4.0 * sizes.vocabulary * sizes.width
    return length * costs.prefill_flops(length).total, weights + 4.0 * 2 * length * sizes.width


def _works(model: LanguageModel, sizes: Sizes, length: int, blocks: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    tokens_1L = torch.randint(sizes.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))

    def read(block: int) -> Callable[[], object]:
        def work() -> None:
            state = model.initial_state(1)
            for part_1L in tokens_1L.split(block, dim=1):
                _, state = model.hidden(part_1L, LocalSequenceOps(), state)

        return torch.inference_mode()(work)

    works = {f"ours, blocks of {block}": read(block) for block in blocks}
    if not absent("transformers"):
        peer = gpt2(sizes, length)
        works["gpt2"] = torch.inference_mode()(lambda: peer.transformer(input_ids=tokens_1L, use_cache=True))
    return works

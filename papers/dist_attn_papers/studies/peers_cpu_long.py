"""Downloaded models against llama.cpp on a processor: long prompts, which take an hour and a half in all."""

import sys

from benchmarks.measured import Found, Panel, Table
from benchmarks.peers import require
from dist_attn_papers.studies.peers_cpu import (
    OURS,
    PEERS,
    SHAPES,
    TESTS,
    THEIRS,
    TINY,
    adapted,
    prompt,
    prompt_works,
    random_model,
    serve,
    size_of,
)

__all__ = ["NAME", "PEERS", "QUESTION", "TESTS", "measure"]

NAME = "peers-cpu-long"
QUESTION = (
    "How fast do downloaded models of 100M and 1B parameters, mamba2 and qwen3_next, read 32,768 tokens on a "
    "processor, against llama.cpp with the same random weights, bits and threads?"
)
LENGTH = 32_768
NOTES = ("As `peers-cpu` measures a shorter prompt; each is read once by either.",)


def measure(smoke: bool) -> Found:
    """Each shape, ours and theirs one after the other.

    Raises: ConfigError where llama.cpp is not installed.
    """
    require(*PEERS)
    shapes, length = (TINY, 64) if smoke else (SHAPES, LENGTH)
    curves: dict[str, dict[float, float]] = {OURS: {}, THEIRS: {}}
    ratios, numbers, rows = {}, {}, []
    for name, shape in shapes.items():
        model, size = random_model(name, shape), size_of(name, shape)
        server = serve(model, {1: length + 256})[1]
        seconds = {who: work() for (_, who), work in prompt_works(adapted(model), server, length).items()}
        del server, model  # with them two copies of the weights
        for who, taken in seconds.items():
            numbers[f"{name}, {who}, seconds"] = taken
            curves[who][float(size)] = length / taken
        ratio = seconds[THEIRS] / seconds[OURS]
        ratios[f"{name}, llama.cpp / ours"] = round(ratio, 3)
        rows.append((name, f"{size / 1e6:,.0f}M", *(f"{s:,.1f} s" for s in seconds.values()), f"{ratio:.2f}x"))
        print(*rows[-1], file=sys.stderr, flush=True)
    columns = ("model", "parameters", OURS, THEIRS, "llama.cpp / ours")
    table = Table(f"{prompt(length)}, float32", columns, tuple(rows))
    panel = Panel("tokens a second by parameters", "parameters", "tokens/s", curves)
    return Found((table,), ratios, numbers, (panel,), NOTES)

"""The cost of a document read with the million-scale model, as `dist-attn plan` prints it."""

import json
from collections import Counter
from pathlib import Path

from dist_attn.commands.tables import Table, byte_size, print_tables
from dist_attn.costs import Rates
from dist_attn.errors import InputError
from dist_attn_papers.million.costs import read_million_costs


def plan_million(folder: Path, tokens: int, *, ranks: int, rates: Rates, as_json: bool) -> None:
    """Print what a million-scale model is expected to cost; it reads sequences of `max_tokens`, each by itself.

    Raises: ConfigError for the folder; InputError for counts below 1.
    """
    if tokens < 1 or ranks < 1:
        raise InputError(f"tokens is {tokens}, ranks is {ranks}; both must be 1 or more")
    costs = read_million_costs(folder)
    whole, rest = divmod(tokens, costs.config.max_tokens)
    lengths = [costs.config.max_tokens] * whole + [rest] * bool(rest)
    sent: Counter[str] = Counter()
    for length in lengths:
        sent.update(costs.bytes_sent(length, ranks))
    flops = sum(costs.flops(length, ranks) for length in lengths)
    expected = {
        "kept_tokens": sum(costs.kept(length) for length in lengths),
        "rows_of_expert": costs.rows_of_expert(lengths[0]),
        "flops_of_rank": flops,
        "compute_seconds": flops / (rates.matmul_flops_per_s * rates.prefill_efficiency),
    }
    name = folder.resolve().name
    if as_json:
        about = {"model": name, "kind": "million", "tokens": tokens, "ranks": ranks, "sequences": len(lengths)}
        facts = {**about, "parameters": costs.parameters, "expected": {**expected, "bytes_sent_of_rank": dict(sent)}}
        print(json.dumps({"object": "plan", **facts, "assumed_matmul_flops_per_s": rates.matmul_flops_per_s}))
        return
    work = [(what.replace("_", " "), f"{value:,.4g}") for what, value in expected.items()]
    print_tables(
        f"{tokens:,} tokens in sequences of up to {lengths[0]:,} on {ranks:,} rank{'s' * (ranks > 1)} with "
        f"{name} ({costs.parameters:,} parameters)",
        [
            Table("Expected work", work),
            Table("Expected to be sent per rank", [(purpose, byte_size(count)) for purpose, count in sent.items()]),
        ],
        [
            f"Expected: the Selector keeps {costs.config.selector.rate:.3%} of the tokens (selector.rate), evenly over "
            "the sequence, and experts are chosen equally often. Validations say what one keeps (kept_share).",
            f"Assumed for each rank: {rates.matmul_flops_per_s / 1e9:.3g} GFLOP/s in matrix products, of which reading "
            f"reaches {rates.prefill_efficiency:.0%}.",
        ],
    )

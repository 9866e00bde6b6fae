"""The cost of a document, before anything is started: the figures of `costs`, as a table or as JSON."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dist_attn.commands.options import PlanOptions, parse_count
from dist_attn.commands.rehearsal import measured_rates
from dist_attn.commands.tables import Table, byte_size, duration, print_tables
from dist_attn.costs import (
    Estimate,
    LanguageModelCosts,
    ModelCosts,
    Rates,
    calibration_file,
    estimate,
    model_kind,
    read_any_costs,
    read_calibration,
    usual_exchange,
)
from dist_attn.costs.estimate import PROCESS_BYTES
from dist_attn.errors import InputError
from dist_attn.model_config.figures import BLOCK_TOKENS, FLOAT_BYTES, tokens_at_once
from dist_attn.model_config.model import MODELS
from dist_attn.model_config.registry import load_build
from dist_attn.shipped import origin, resolve_model_folder
from dist_attn.wire.specs import tokens_with_room

__all__ = ["plan"]


def plan(options: PlanOptions) -> None:
    """Print what reading `tokens` (like 2M) costs on `ranks` ranks of one machine.

    `gflops` is one rank's matmul rate; with `measure`, that many ranks encode for a few seconds to find all rates.
    `backend`, `exchange` and `weights` are those of the run that is planned: auto is what it would choose here.
    `device` and `dtype` are those of ranks that measure.

    Raises: InputError for a count that cannot be read, ModelFolderError or ConfigError for the model, EngineError or
        MissingExtraError when measuring fails.
    """
    count, ranks, gflops = parse_count(options.tokens), options.ranks, options.gflops
    folder = resolve_model_folder(options.model)
    rates = Rates()
    if gflops is not None:
        if not 0 < gflops < float("inf"):
            raise InputError(f"--gflops {gflops:g} was given; needed is a rate above 0, as `dist-attn doctor` measures")
        rates = replace(rates, matmul_flops_per_s=gflops * 1e9)
    kind = MODELS.find(name) if (name := model_kind(folder)) else None
    if kind is not None and kind.plan is not None:
        if options.measure or options.exchange != "auto" or options.weights != "float32":
            raise InputError(
                f"--measure, --exchange or --weights was given; a {name} has no states to exchange, holds its weights "
                "in float32, and its costs are those expected by formula: leave them out"
            )
        load_build(kind.plan)(folder, count, ranks=ranks, rates=rates, as_json=options.as_json)
        return
    if options.weights_over_ranks and origin(folder) != "downloaded":
        raise InputError(f"--weights-over-ranks is for models as they were downloaded, and {folder} is none")
    if origin(folder) == "downloaded":
        if options.measure or options.exchange != "auto":
            raise InputError(
                "--measure or --exchange was given; of a model as it was downloaded times are not measured, and how "
                "its states travel is not chosen: leave them out"
            )
        return _plan_downloaded(folder, count, options=options, rates=rates)
    device = "cuda" if options.device.startswith("cuda") else "cpu"
    costs = read_any_costs(folder, options.weights, device)
    if options.measure:
        if not isinstance(costs, LanguageModelCosts):
            raise InputError(
                f"--measure was given, and {folder} holds a {model_kind(folder)}; ranks that measure read with a "
                "language model: leave it out, and give --gflops, as `dist-attn doctor` measures"
            )
        if options.weights != "float32":
            raise InputError(
                f"--measure and --weights {options.weights} were given; ranks are timed with float32 weights: "
                "leave one out"
            )
        if gflops is not None:
            raise InputError("--measure and --gflops were given; needed is one of them, or none")
        if options.device != "cpu":
            from dist_attn.devices import choose_device

            device = choose_device(options.device).type
        rates = measured_rates(folder, costs, tokens_at_once(device, BLOCK_TOKENS), options=options)
    elif options.device.startswith("cuda") and gflops is None:
        raise InputError(f"--device {options.device} was given, whose rate is not known: add --measure or --gflops")
    exchange = _chosen(costs, ranks, options.backend) if options.exchange == "auto" else options.exchange
    block = tokens_at_once(device, BLOCK_TOKENS)
    result = estimate(costs, count, ranks=ranks, block_tokens=block, rates=rates, exchange=exchange)
    name = folder.resolve().name
    if options.as_json:
        print(json.dumps(_as_object(name, result)))
    else:
        _print(name, result, "Measured" if options.measure else "Assumed")


def _chosen(costs: ModelCosts, ranks: int, backend: str) -> str | None:
    """The exchange that ranks choose on this machine: the one measured fastest, if any was; None without a choice."""
    messages = [message for mixer in costs.kinds if (message := mixer.traffic().scanned) is not None]
    if not messages or ranks < 2 or any(usual_exchange(message, ranks) == "in_turn" for message in messages):
        return None
    message = max(messages, key=lambda one: one.bytes)
    known = read_calibration(calibration_file(os.environ))
    return known.choose(backend, ranks, message.bytes, (tuple(range(ranks)),))


def _as_object(model: str, result: Estimate) -> dict[str, Any]:
    values = asdict(result)
    memory, rates = values.pop("memory"), values.pop("rates")
    return {
        "object": "plan",
        "model": model,
        **values,
        "prefill_seconds": result.prefill_seconds,
        "memory_bytes_per_rank": {**memory, "peak": result.memory.peak},
        "assumed_rates_per_rank": rates,
    }


def _print(model: str, result: Estimate, source: str) -> None:
    ranks = "1 rank" if result.ranks == 1 else f"{result.ranks:,} ranks"
    print_tables(
        f"{result.tokens:,} tokens on {ranks} with {model} ({result.parameters:,} parameters)",
        [_memory(result), _exchange(result), _time(result), _output(result)],
        _notes(result, source),
    )


def _memory(result: Estimate) -> Table:
    memory = result.memory
    rows = [
        ("Python and libraries", byte_size(memory.process)),
        ("weights" if result.weights == "float32" else f"weights, {result.weights}", byte_size(memory.weights)),
        ("state of one session", byte_size(memory.state)),
        ("temporary tensors of a block", byte_size(memory.activations)),
        ("other ranks' states", byte_size(memory.exchange)),
        ("while weights are read", byte_size(memory.loading)),
        ("peak", byte_size(memory.peak)),
    ]
    return Table("Memory per rank", rows)


def _exchange(result: Estimate) -> Table:
    states = f"states, by {result.exchange}" if result.exchange else "states"
    rows = [
        (states, byte_size(result.carry_message_bytes), byte_size(result.carry_bytes_sent)),
        ("edge tokens", byte_size(result.halo_message_bytes), byte_size(result.halo_bytes_sent)),
    ]
    if result.key_bytes_sent:
        rows.append(("queries, keys and outputs", "", byte_size(result.key_bytes_sent)))
    return Table("Exchange per rank", rows, ("", "a layer and block", "sent in all"))


def _time(result: Estimate) -> Table:
    rows = [
        ("computing", duration(result.compute_seconds)),
        ("held up by exchanges", duration(result.exchange_seconds)),
        ("reading and tokenising", duration(result.text_seconds)),
        ("handing tokens out and rows back", duration(result.handing_seconds)),
        ("the document in all", duration(result.prefill_seconds)),
        ("tokens read per second", f"{result.tokens / result.prefill_seconds:,.0f}"),
    ]
    if result.decode_tokens_per_second is not None:
        rows.append(("tokens written per second", f"{result.decode_tokens_per_second:,.0f}"))
    return Table("Time", rows)


def _output(result: Estimate) -> Table:
    titles = {"token": "a row per token", "window": "a row per 512 tokens", "document": "one row in all"}
    rows = [(titles[name], *(byte_size(size) for size in sizes.values())) for name, sizes in result.output.items()]
    return Table("Output", rows, ("", *next(iter(result.output.values()))))


def _notes(result: Estimate, source: str) -> list[str]:
    rates = result.rates
    notes = [
        f"{source} for each rank: {rates.matmul_flops_per_s / 1e9:.3g} GFLOP/s in matrix products, of which reading "
        f"reaches {rates.prefill_efficiency:.0%}; {rates.memory_bytes_per_s / 1e9:.3g} GB/s of memory, which bounds "
        f"writing; {rates.link.latency_s * 1e6:.3g} us and {rates.link.bytes_per_s / 1e9:.3g} GB/s between ranks.",
    ]
    if rates.exposed_s:
        notes.append(f"{source}: the exchanges of a layer and block hold a rank up for {duration(rates.exposed_s)}.")
    if source == "Assumed" and result.decode_tokens_per_second is not None:
        notes.append("With --measure the ranks read for a few seconds and find the rates of this machine.")
    notes.append(
        f"Times are for a machine that does nothing else; in the last minute {os.getloadavg()[0]:.1f} processes wanted "
        f"to run here, on {os.cpu_count()} cores."
    )
    return notes


def _plan_downloaded(folder: Path, tokens: int, *, options: PlanOptions, rates: Rates) -> None:
    """Print what a model of transformers takes as it was downloaded; its states are in float32.

    Raises: InputError for counts below 1 and for weights in 8 bits; as `check_downloaded` for the folder.
    """
    ranks = options.ranks
    if tokens < 1 or ranks < 1:
        raise InputError(f"tokens is {tokens}, ranks is {ranks}; both must be 1 or more")
    if options.weights == "int8":
        raise InputError(
            "--weights int8 was given; which weights of a downloaded model are held in 8 bits is known once it is "
            "loaded: plan with bfloat16, which takes more"
        )
    from dist_attn.control.preflight import check_downloaded  # it starts a process

    sizes = check_downloaded(folder)
    apart = options.weights_over_ranks and ranks > 1
    held = sizes.parameters_of_a_rank(ranks) if apart else sizes.parameters
    memory = {
        "process": PROCESS_BYTES,
        "weights": held * (FLOAT_BYTES if options.weights == "float32" else FLOAT_BYTES // 2),
        "state": sizes.state_bytes_at(tokens_with_room(tokens)),
        "state_of_encoding": sizes.state_bytes_at(-(-tokens // ranks)),
    }
    states = {"before_any_token": sizes.state_bytes, "per_token": sizes.token_bytes}
    flops = 2.0 * sizes.parameters * tokens / ranks
    seconds = flops / (rates.matmul_flops_per_s * rates.prefill_efficiency)
    name = folder.resolve().name
    if options.as_json:
        about = {"model": name, "kind": "downloaded", "tokens": tokens, "ranks": ranks, "parameters": sizes.parameters}
        work = {"state_bytes": states, "memory_bytes_per_rank": memory, "compute_seconds": seconds}
        print(json.dumps({"object": "plan", **about, **work, "weights": options.weights}))
        return
    print_tables(
        f"{tokens:,} tokens on {ranks:,} rank{'s' * (ranks > 1)} with {name} ({sizes.parameters:,} parameters)",
        [
            Table(
                "Memory per rank",
                [
                    ("Python and libraries", byte_size(memory["process"])),
                    (f"weights, {options.weights}{', over ranks' * apart}", byte_size(memory["weights"])),
                    ("state of a text that is drawn from", byte_size(memory["state"])),
                    ("or of an encoding, spread over ranks", byte_size(memory["state_of_encoding"])),
                ],
            ),
            Table(
                "State of one text",
                [
                    ("before any token", byte_size(sizes.state_bytes)),
                    ("each token, at most", byte_size(sizes.token_bytes)),
                ],
            ),
            Table("Time", [("computing, at most", duration(seconds))]),
        ],
        [
            f"Assumed for each rank: {rates.matmul_flops_per_s / 1e9:.3g} GFLOP/s in matrix products, of which reading "
            f"reaches {rates.prefill_efficiency:.0%}; every parameter counts, also of experts that are not asked.",
            "Temporary tensors of a block and what ranks exchange are not counted.",
        ],
    )

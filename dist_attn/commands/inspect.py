"""Read-only commands: settings, states, plans, a running service, mixers, models, this machine, benchmarks.

Like all commands they import what they need when they run.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dist_attn.commands.options import (
    AsJson,
    Config,
    DataDir,
    Host,
    Model,
    Port,
    Ranks,
    StateExchange,
    Url,
    Weights,
    leave_to_service,
)
from dist_attn.wire.choices import CpuBackend

__all__ = ["ShowByDefault", "bench", "config_show", "doctor", "mixers", "models", "plan", "state_show", "top"]


def config_show(config: Config = None, as_json: AsJson = False) -> None:
    """Print every setting of `serve`, its value, where that comes from, and what it is; of keys only their number.

    Example: dist-attn config show --config serve.toml
    """
    from dist_attn.commands.tables import Table, print_tables
    from dist_attn.settings import read_settings, settings_words

    rows, words = list(read_settings(config, environment=os.environ).rows()), settings_words()
    if as_json:
        print(json.dumps({key: {"value": value, "origin": origin, "what": words[key]} for key, value, origin in rows}))
        return
    cells = [(key, "" if value is None else str(value), origin, words[key]) for key, value, origin in rows]
    notes = [
        "a file is given by --config or DIST_ATTN_CONFIG; in the environment http.port is DIST_ATTN_HTTP__PORT",
        "flags of `dist-attn serve` come over the environment, and this over the file",
    ]
    table = Table("in the order of the file", cells, ("key", "value", "from", "what"), texts=(0, 3))
    print_tables("settings", [table], notes)


class ShowByDefault(TyperGroup):
    """A group of commands of which `show` need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `show` before what names no command."""
        named = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if named else ["show", *args])


def state_show(
    file: Annotated[Path, typer.Argument(help="A snapshot of a session's state.")],
    as_json: AsJson = False,
) -> None:
    """Check the file of a state, and print whose it is, where it stands and what it holds.

    Example: dist-attn state session.state
    """
    from dist_attn.commands.show_state import show_state

    show_state(file, as_json=as_json)


def plan(
    tokens: Annotated[str, typer.Option(help="How long the document is: 2M, 500k, 1_000_000.")],
    ranks: Ranks = 1,
    model: Model = None,
    gflops: Annotated[float | None, typer.Option(help="Matmul rate of one rank, as `doctor` measures it.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Let that many ranks encode here for a while.")] = False,
    backend: Annotated[CpuBackend, typer.Option(help="What carries the bytes between ranks.")] = "gloo",
    exchange: StateExchange = "auto",
    weights: Weights = "float32",
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """What a document will cost: memory, bytes between ranks, time, output; here, or of a running service now.

    Example: dist-attn plan --tokens 2M --ranks 4 --measure
    """
    if url is not None:
        here = {"gflops": gflops is not None, "measure": measure, "backend": backend != "gloo"}
        leave_to_service(ranks=ranks > 1, exchange=exchange != "auto", weights=weights != "float32", **here)
        from dist_attn.commands.remote import plan_remotely

        return plan_remotely(url, tokens, model=model, as_json=as_json)
    from dist_attn.commands.plan import plan as print_plan

    print_plan(
        tokens, ranks=ranks, model=model, gflops=gflops, as_json=as_json,
        measure=measure, backend=backend, exchange=exchange, weights=weights,
    )  # fmt: skip


def top(
    url: Annotated[str, typer.Option(help="The service.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Look once, in place of every second.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ranks, queue, sessions and speed of a running service, live; names and values with tabs where no terminal is.

    Example: dist-attn top --url http://127.0.0.1:8000

    Example: dist-attn top --once | grep tokens_per_second
    """
    from dist_attn.commands.top import top as show

    show(url, once=once, as_json=as_json)


def mixers(
    hidden_size: Annotated[int, typer.Option(help="Width of the layer.", min=1, max=1 << 20)] = 512,
    num_heads: Annotated[int, typer.Option(help="Heads of mixers that have them.", min=1, max=1 << 12)] = 8,
    tokens: Annotated[str, typer.Option(help="How long the sequence is: 64k, 1M, 1_000_000.")] = "64k",
    ranks: Ranks = 4,
    as_json: AsJson = False,
) -> None:
    """Every kind of token mixer: its paradigm, what it can do, and what one layer costs.

    Example: dist-attn mixers --hidden-size 256 --tokens 1M --ranks 8
    """
    from dist_attn.commands.mixer_table import print_mixers

    print_mixers(tokens, hidden_size=hidden_size, num_heads=num_heads, ranks=ranks, as_json=as_json)


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Model folders; without any, the models that ship.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List models that --model takes: those that ship, or those in folders, with their size and what they are for.

    Example: dist-attn models

    Example: dist-attn models runs/first/model
    """
    from dist_attn.commands.tables import byte_size, stdout_console
    from dist_attn.costs import model_kind
    from dist_attn.shipped import DEFAULT_MODEL, purpose, resolve_model_folder, shipped_models

    model_folders = [resolve_model_folder(folder) for folder in folders] if folders else shipped_models()
    described: list[dict[str, Any]] = [
        {
            "name": str(folder) if folders else folder.name,
            "kind": model_kind(folder),
            "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            "default": not folders and folder.name == DEFAULT_MODEL,
            "purpose": purpose(folder),
        }
        for folder in model_folders
    ]
    if as_json:
        print(json.dumps({"object": "list", "data": described}))
        return
    console = stdout_console()
    for one in described:
        default = ", taken where no --model is given" if one["default"] else ""
        console.print(f"{one['name']}  {one['kind']}, {byte_size(one['bytes'])}{default}", soft_wrap=True, markup=False)
        console.print(f"    {one['purpose'] or 'no README.md says what it is for'}", soft_wrap=True, markup=False)


def doctor(
    config: Config = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Time the exchanges between ranks too, and keep which is fastest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Try out whether `serve` would work here, with the same settings; what is missing or broken, and what to do.

    Code 1 when it would not, or when what it needs did not answer in time.

    Example: dist-attn doctor --port 8000
    """
    from dist_attn.commands.doctor import doctor as examine

    flags = {"model": model, "http.host": host, "http.port": port, "data_dir": data_dir}
    raise typer.Exit(examine(config, flags, as_json=as_json, exchanges=calibrate))


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which one; without a name, all are listed.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results there too.")] = None,
    minutes: Annotated[float, typer.Option(help="End it then; experiments go on next time.", min=0.1)] = 30,
) -> None:
    """Run a benchmark or an experiment of the source tree, once its tests are green, or list them.

    What it does not know itself goes to the benchmark: `--smoke` asks only whether it runs.

    Example: dist-attn bench

    Example: dist-attn bench forward --json forward.json
    """
    from dist_attn.commands.bench import bench as run_benchmark

    raise typer.Exit(run_benchmark(name, json_file, options=context.args, deadline_s=60 * minutes))

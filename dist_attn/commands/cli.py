"""The command line: argument parsing and one call per command.

Commands that look at things are in `commands/inspect.py`. Commands import what they need when they run, so
`dist-attn --help` and `serve` never load torch.
Bad input, and a file or disk that cannot be read or written, ends with exit code 2 and one line on stderr; a failure
of the work with exit code 1 and one line.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dist_attn import __version__
from dist_attn.commands import corpus, inspect
from dist_attn.commands.options import (
    Device,
    Dtype,
    EncodeOptions,
    EngineDevice,
    EngineDtype,
    GenerateOptions,
    LogitsOptions,
    Model,
    Ranks,
    ServeOptions,
    Weights,
    chosen_compute,
    leave_to_service,
    sampling_spec,
    taking,
)
from dist_attn.errors import CommError, DistAttnError, InputError, StorageError
from dist_attn.host_limits import ask_for_short_slices, compute_environment, load
from dist_attn.launchers import MEETING_VARIABLE, ended_in_order, is_first_rank, place_on_host, read_launch
from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder
from dist_attn.shipped.gguf_file import is_gguf
from dist_attn.wire.specs import SamplingSpec

__all__ = ["app", "main"]

# typer carries its own copy of click in newer releases; this is the base of its usage errors in either.
UsageErrors = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)

PATIENCE_S = 2.0  # of a rank that could report a failed exchange, for each rank before it that could as well

_OUT_OF_MEMORY = (
    "there is not enough memory for this: take a smaller model, batch or segment, or more ranks "
    "(`dist-attn plan` says what a model needs)"
)

app = typer.Typer(
    name="dist-attn",
    epilog="Try: dist-attn serve; dist-attn COMMAND --help; each has an example. dist-attn help WORD searches them.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

configuration = typer.Typer(name="config", help="The settings of `serve`.", no_args_is_help=True)
app.add_typer(configuration)

states = typer.Typer(
    name="state", help="The file of a state, or a folder of them.", cls=inspect.ShowByDefault, no_args_is_help=True
)
app.add_typer(states)

models = typer.Typer(
    name="models",
    help="Models that --model takes by name.",
    cls=inspect.ShowByDefault,
    no_args_is_help=False,
)
app.add_typer(models)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"dist-attn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Long sequences through attention with a constant-size state: encode, generate, train, serve."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 the work failed, 2 the input was not usable."""
    try:
        code = _run()
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except UsageErrors as error:
        code = _complain(_usage(error), 2)
    except (InputError, StorageError) as error:
        code = _complain(str(error), 2)
    except CommError as error:
        code = _complain(str(error), 1, instead_of_rank_0=True)
    except DistAttnError as error:
        code = _complain(str(error), 1)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): that is its right, and no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        # A full disk, or a file that went away during the work.
        where = f"{error.filename}: " if error.filename else ""
        code = _complain(f"{where}{error.strerror or error}", 2)
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        code = _complain(_OUT_OF_MEMORY, 1)
    gc.freeze()  # to look for garbage at the exit takes a quarter of the time of a short command
    sys.exit(code if isinstance(code, int) else 0)


def _run() -> object:
    if not sys.stdout.isatty():
        app.rich_markup_mode = configuration.rich_markup_mode = None  # help without boxes, for grep and files
    try:
        code = app(standalone_mode=False)
    except SystemExit as stop:
        # Typer turns a broken pipe into an exit of its own, with code 1.
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    # Now, while a broken pipe can still be met; at the interpreter's exit it would be a traceback.
    sys.stdout.flush()
    return code


def _is_of_memory(error: Exception) -> bool:
    """Return whether memory ran out; torch has an error of its own for devices, and only words for the CPU."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory", "not enough memory")
    )


def _usage(error: Exception) -> str:
    """The fault in the arguments in click's words; where no command was named, a question which one is meant."""
    words = str(getattr(error, "format_message", error.__str__)())
    if type(error).__name__ == "NoArgsIsHelpError":  # its words are the help; typer shows it itself on a terminal
        print(words)
        words = ""
    return words or "which command? They are listed above"


def _compute_here() -> None:
    """Load torch, once OpenMP is told how this process shares the host with those of its launcher."""
    _, of_host = place_on_host(os.environ) or (0, 0)
    os.environ |= compute_environment(of_host or 1)
    ask_for_short_slices()
    load("torch")
    gc.freeze()


def _wait_for_rank_0_error() -> None:
    """Let rank 0 print the error first: its launcher then ends the others, and nothing is printed twice."""
    launch = read_launch(os.environ)
    time.sleep(PATIENCE_S * ((launch and launch.rank) or 0))


def _complain(message: str, code: int, *, instead_of_rank_0: bool = False) -> int:
    if MEETING_VARIABLE in os.environ:
        from dist_attn.commands.local_ranks import leave_words

        leave_words(message, code, of_others=instead_of_rank_0)
        return code
    if instead_of_rank_0:
        _wait_for_rank_0_error()
    # One rank of a host speaks for all: under torchrun or mpiexec every rank meets the same bad input, but hosts may
    # have other files and devices.
    place = place_on_host(os.environ)
    if instead_of_rank_0 or is_first_rank(os.environ) or (place is not None and place[0] == 0):
        print(f"dist-attn: {' '.join(message.split())}", file=sys.stderr)
    return code


def _over_ranks(ranks: int) -> None:
    """Let `ranks` ranks of this machine do the work, and exit, where there are several and this is none of them."""
    if ranks == 1 or MEETING_VARIABLE in os.environ:
        return
    from dist_attn.commands.local_ranks import run_over_ranks

    words = run_over_ranks(ranks, sys.argv[1:])
    raise typer.Exit(_complain(words.message, words.code) if words.message else words.code)


@app.command()
@taking(EncodeOptions)
def encode(options: EncodeOptions) -> None:
    """Turn a text into vectors, one for each passage; here, over several ranks, or by a service.

    Example: dist-attn encode book.txt --out book.npy

    Example: dist-attn encode book.txt --out book.npy --ranks 4

    Example: dist-attn encode book.txt --out book.npy --url http://127.0.0.1:8000
    """
    from dist_attn.commands.row_files import check_rows_file, check_text

    check_text(options.file)
    check_rows_file(options.out, options.file, with_text=options.with_text)
    if options.url is None:
        resolve_model_folder(options.model or DEFAULT_ENCODER)  # now: loading torch takes seconds
        _over_ranks(options.ranks)
    try:
        with ended_in_order():
            if options.url is None:
                _compute_here()
                from dist_attn.commands.encode_file import encode_here

                report = encode_here(options)
            else:
                chosen = {"deterministic": options.deterministic, "exchange": options.exchange != "auto"}
                chosen["ranks"] = options.ranks != 1
                leave_to_service(**chosen, **chosen_compute(options))
                from dist_attn.commands.remote import encode_remotely

                report = encode_remotely(options.url, options) if is_first_rank(os.environ) else None
    except KeyboardInterrupt:
        raise typer.Exit(_complain(f"stopped by Ctrl-C; {options.out} was not written", 130)) from None
    if report is not None:
        print(json.dumps(report))


@app.command()
@taking(LogitsOptions)
def logits(options: LogitsOptions) -> None:
    """Score every token that could follow each token of a text, alone or over several ranks.

    Example: dist-attn logits --model FOLDER --tokens tokens.npy --out logits.npy --ranks 2
    """
    _over_ranks(options.ranks)
    _compute_here()
    from dist_attn.commands.logits import logits_here

    with ended_in_order():
        report = logits_here(options)
    if report is not None:
        print(json.dumps(report))


@app.command()
@taking(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Continue a text, token by token, from the recurrent state; here, or by a running service.

    Example: dist-attn generate --prompt "It was the best of times" --max-tokens 100
    """
    if not is_first_rank(os.environ):
        return  # one state, one stream of tokens: there is nothing to share
    if (options.prompt is None) == (options.prompt_file is None):
        raise InputError("give either --prompt TEXT or --prompt-file FILE")
    prompt = options.prompt or ""
    data = prompt.encode(errors="surrogateescape") if options.prompt_file is None else _read(options.prompt_file)
    spec = sampling_spec(options)

    def show(text: str) -> None:
        if not options.as_json:
            print(text, end="", flush=True)

    if options.url is not None:
        leave_to_service(weights=options.weights != "float32", **chosen_compute(options))
        from dist_attn.commands.remote import generate_remotely

        result = generate_remotely(options.url, data, spec, model=options.model, on_text=show)
    else:
        result = _generate_here(options, data, spec, show)
    print(json.dumps(result) if options.as_json else "")


def _generate_here(
    options: GenerateOptions, data: bytes, spec: SamplingSpec, show: Callable[[str], None]
) -> dict[str, Any]:
    _compute_here()
    from dist_attn.devices import choose_compute
    from dist_attn.generation.text import generate_text

    compute = choose_compute(options.device, options.dtype)
    return generate_text(options.model, data, spec, on_text=show, weights=options.weights, compute=compute, tell=_tell)


@app.command()
def evaluate(
    file: Annotated[Path, typer.Argument(help="The text to score.")],
    context: Annotated[
        int | None,
        typer.Option(help="Read in windows of so many tokens, half overlapping; without it the state is carried on."),
    ] = None,
    ranks: Ranks = 1,
    model: Model = None,
    weights: Weights = "float32",
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Bits per byte of a text under a model, read as one stream or in windows, alone or over several ranks.

    Example: dist-attn evaluate book.txt --ranks 2
    """
    _over_ranks(ranks)
    _compute_here()
    from dist_attn.comm import open_communicator
    from dist_attn.devices import choose_compute
    from dist_attn.training.evaluation import evaluate_file

    data, compute = _read(file), choose_compute(device, dtype)
    with open_communicator(device=compute.device) as comm:
        tell = _tell if comm.rank == 0 else None
        score = evaluate_file(file, data, model, context, weights=weights, compute=compute, tell=tell, comm=comm)
    if comm.rank == 0:
        print(json.dumps(score))


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The training configuration (TOML).")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: run.steps=100")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint of the run folder.")] = False,
    model: Annotated[
        str | None, typer.Option(help="The folder, or the name, of a downloaded model that is trained on.")
    ] = None,
    ranks: Ranks = 1,
    device: EngineDevice = None,
    dtype: EngineDtype = None,
) -> None:
    """Train a model, alone or over several ranks; the run folder gets checkpoints, metrics and it.

    Example: dist-attn train examples/train-books.toml --set run.folder=runs/first

    Example: dist-attn train examples/train-books.toml --ranks 4 --set run.sequence_ranks=2

    Example: dist-attn train fine-tune.toml --model downloads/qwen3-next --ranks 2
    """
    _over_ranks(ranks)
    _compute_here()
    from dist_attn.commands.train import train_here
    from dist_attn.training.config import read_config

    flags = {"run.device": device, "run.dtype": dtype}
    settings = read_config(
        config, [*(set_ or ()), *(f'{key}="{value}"' for key, value in flags.items() if value)], model
    )
    with ended_in_order():
        said, code = train_here(settings, resume=resume)
    if said:
        raise typer.Exit(_complain(said, code))


@app.command()
def average(
    checkpoints: Annotated[list[Path], typer.Argument(help="Checkpoints of a run, or model folders.")],
    out: Annotated[Path, typer.Option(help="Where the model folder goes.")],
) -> None:
    """Average checkpoints into one model folder.

    Example: dist-attn average runs/first/checkpoints/step-* --out averaged
    """
    if not is_first_rank(os.environ):
        return
    _compute_here()
    from dist_attn.training.averaging import average_folders

    print(json.dumps(average_folders(checkpoints, out)))


@app.command()
def convert(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face folder: config.json, safetensors, tokenizer.json; or a GGUF file.")
    ],
    out: Annotated[Path, typer.Option(help="Where the model folder goes; it must not exist yet.")],
    to: Annotated[
        Literal["softmax", "rfa", "elu", "stream"],
        typer.Option(
            help="Exact, or the same weights with kernel attention (elu: encoders only), to be trained; stream: a "
            "text_encoder of this project that reads texts of any length in blocks."
        ),
    ] = "softmax",
    num_random: Annotated[int, typer.Option(help="Random vectors per head of rfa.", min=1, max=1 << 16)] = 64,
    seed: Annotated[int, typer.Option(help="What decides the random vectors of rfa.", min=0, max=1 << 53)] = 0,
    exact_layer: Annotated[
        list[int] | None,
        typer.Option(help="A layer, from 0, that stays exact beside kernel attention; repeatable.", min=0),
    ] = None,
    weights: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of a GGUF file, how its dequantised weights are written.")
    ] = "float32",
) -> None:
    """Make a BERT-shaped (MiniLM) model into a model folder for other commands.

    With dist-attn-papers also a GPT-2, Llama or GPT-NeoX (Pythia). Of a GGUF file it is the folder of transformers that
    `--model FILE.gguf` makes and keeps by itself.

    Example: dist-attn convert downloads/all-MiniLM-L6-v2 --out models/minilm

    Example: dist-attn convert downloads/qwen3.gguf --out models/qwen3 --weights bfloat16
    """
    if not is_first_rank(os.environ):
        return
    _compute_here()
    if is_gguf(folder):
        from dist_attn.conversion.gguf import convert_gguf

        if to != "softmax" or exact_layer:
            raise InputError(f"{folder} is a GGUF file, which is converted as it is: leave --to and --exact-layer out")
        print(json.dumps(convert_gguf(folder, out, weights)))
        return
    from dist_attn.conversion import Conversion, convert_folder, convert_sentence_encoder

    if to == "stream":
        print(json.dumps(convert_sentence_encoder(folder, out)))
        return
    print(json.dumps(convert_folder(folder, out, Conversion(to, num_random, seed, tuple(exact_layer or ())))))


@app.command()
@taking(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Start the HTTP service with its engine on this machine; `dist-attn config show` lists all that can be set.

    Example: dist-attn serve --ranks 4 --port 8000

    Example: dist-attn serve --model writer-12m --encoder minilm-stream
    """
    from dist_attn.commands.serve import serve as run_service

    flags = {
        "model": options.model,
        "encoder.model": options.encoder,
        "data_dir": options.data_dir,
        "http.host": options.host,
        "http.port": options.port,
        "engine.ranks": options.ranks,
        "engine.backend": options.backend,
        "engine.device": options.device,
        "engine.dtype": options.dtype,
        "engine.weights": options.weights,
        "engine.weights_over_ranks": options.weights_over_ranks,
    }
    raise typer.Exit(run_service(options.config, flags))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where the keys go; those that are there stay.")],
) -> None:
    """Make the keys with which API, controller and agents on several hosts encrypt what they say.

    Example: dist-attn keys /etc/dist-attn/keys
    """
    from dist_attn.wire.curve import make_keys

    written = make_keys(folder)
    print(f"{len(written)} files written to {folder}" if written else f"{folder} has all keys already")


app.command()(corpus.encode_corpus)
app.command()(corpus.search)
configuration.command("show")(inspect.config_show)
states.command("show")(inspect.state_show)
states.command("repair")(inspect.state_repair)
models.command("show")(inspect.models_show)
models.command("add")(inspect.models_add)
for command in (inspect.plan, inspect.top, inspect.mixers, inspect.doctor):
    app.command()(command)
app.command("help")(inspect.help_search)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(inspect.bench)


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None

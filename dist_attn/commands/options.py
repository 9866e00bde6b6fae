"""Options that several commands share, the options of commands with many, and refusals beside `--url`."""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
import typer

from dist_attn.errors import InputError
from dist_attn.wire import choices
from dist_attn.wire.specs import SamplingSpec

Config = Annotated[Path | None, typer.Option(help="A TOML file with settings.")]
Model = Annotated[str | None, typer.Option(help="A model folder, or a name that `dist-attn models` lists.")]
Ranks = Annotated[int, typer.Option(help="Processes of this machine that share the work.", min=1, max=1024)]
StateExchange = Annotated[
    choices.StateExchange,
    typer.Option(
        help="How processes that share a text hand on what they have read; auto takes what was measured fastest."
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")]
Port = Annotated[int | None, typer.Option(help="Port to listen on (default: 8000).", min=1, max=65535)]
DataDir = Annotated[
    Path | None, typer.Option(help="Where uploads and states are kept (default: dist-attn in your data folder).")
]
Url = Annotated[str | None, typer.Option(help="Let this service do it (a key goes into DIST_ATTN_API_KEY).")]
_DEVICES = "auto (a GPU where there is one), cpu, cuda (one for each process) or cuda:N (one for all of this machine)."
Device = Annotated[str, typer.Option("--device", help=f"What computes: {_DEVICES}", metavar="DEVICE")]
EngineDevice = Annotated[
    str | None, typer.Option("--device", help=f"What ranks compute on: {_DEVICES}", metavar="DEVICE")
]
_PRECISIONS = "The precision of products; auto: bfloat16 on GPUs and for encoders, else float32."
Dtype = Annotated[choices.Precision, typer.Option(help=_PRECISIONS)]
EngineDtype = Annotated[choices.Precision | None, typer.Option(help=_PRECISIONS)]
OVER_RANKS = "Let each rank hold the weights of a part of the layers of a downloaded model."
Weights = Annotated[choices.WeightPrecision, typer.Option(help="How the model's weights lie in memory.")]
Granularity = Annotated[
    Literal["token", "window", "sentence", "paragraph", "chapter", "document"],
    typer.Option(
        help="What gets a vector: every token (a piece of a word), every passage of --window, sentence, paragraph or "
        "chapter, or the text."
    ),
]
Window = Annotated[
    int | None,
    typer.Option(help="Tokens of a passage (default: 512, or all the model reads at once).", min=1, max=1 << 53),
]
Pooling = Annotated[
    Literal["mean", "last"] | None,
    typer.Option(help="A passage's vector is the mean of its tokens' or the last one (default: mean)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object in place of text for people.")]


_WITH_FLAGS = {"max_tokens", "temperature", "top_k", "top_p", "seed"}
# This command prints none, takes the prompt, and holds its text to no form.
_OF_ANSWERS = {"logprobs", "prompt_logprobs", "prompt_tokens", "grammar"}
_RARE = [name for name in SamplingSpec.__struct_fields__ if name not in _WITH_FLAGS | _OF_ANSWERS]
DrawingSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help=f"Set a rarer option of drawing: {', '.join(_RARE)}; repeatable."),
]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `encode`."""

    file: Annotated[Path, typer.Argument(help="The text to encode.")]
    out: Annotated[
        Path,
        typer.Option(
            help="Where the rows go: vectors as NumPy's float32 (.npy), or with document, number, ranges of tokens and "
            "bytes (.jsonl, .arrow, .parquet)."
        ),
    ]
    with_text: Annotated[
        bool, typer.Option("--with-text", help="Write the text of each row beside its vector; not in .npy.")
    ] = False
    granularity: Granularity = "window"
    window: Window = None
    pooling: Pooling = None
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bytes by any number of processes; slower.")
    ] = False
    exchange: StateExchange = "auto"
    ranks: Ranks = 1
    device: Device = "auto"
    dtype: Dtype = "auto"
    model: Model = None
    url: Url = None


@dataclass(frozen=True, kw_only=True)
class LogitsOptions:
    """Options of `logits`."""

    tokens: Annotated[Path, typer.Option(help="A NumPy file (.npy) with the ids of one text, integers [tokens].")]
    out: Annotated[Path, typer.Option(help="Where they go: a NumPy file (.npy), float32 [tokens, vocabulary].")]
    block: Annotated[int | None, typer.Option(help="Tokens that are read at a time (default: 8,192).", min=1)] = None
    ranks: Ranks = 1
    model: Model = None
    weights: Weights = "float32"
    weights_over_ranks: Annotated[bool, typer.Option("--weights-over-ranks", help=OVER_RANKS)] = False
    device: Device = "auto"
    dtype: Dtype = "auto"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `generate`."""

    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the text to continue.")] = None
    max_tokens: Annotated[int, typer.Option(help="Tokens to draw at most.")] = 200
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.8
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 0
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this probability.")] = 1.0
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeatable.")] = None
    set_: DrawingSettings = None
    model: Model = None
    weights: Weights = "float32"
    device: Device = "auto"
    dtype: Dtype = "auto"
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of streamed text.")] = False
    url: Url = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan`."""

    tokens: Annotated[str, typer.Option(help="How long the document is: 2M, 500k, 1_000_000.")]
    ranks: Annotated[int, typer.Option(help="Processes that share each document.", min=1, max=1024)] = 1
    model: Model = None
    gflops: Annotated[float | None, typer.Option(help="Matmul rate of one rank, as `doctor` measures it.")] = None
    measure: Annotated[bool, typer.Option("--measure", help="Let that many ranks encode here for a while.")] = False
    backend: Annotated[choices.CpuBackend, typer.Option(help="What carries the bytes between ranks.")] = "gloo"
    exchange: StateExchange = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"
    weights: Weights = "float32"
    weights_over_ranks: Annotated[bool, typer.Option("--weights-over-ranks", help=OVER_RANKS)] = False
    as_json: AsJson = False
    url: Url = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `serve`."""

    config: Config = None
    model: Model = None
    encoder: Annotated[
        str | None,
        typer.Option(help="A second model, which encodings and embeddings go to; --model writes (default: none)."),
    ] = None
    ranks: Annotated[
        int | None, typer.Option(help="Processes that share each document (default: 1).", min=1, max=1024)
    ] = None
    backend: Annotated[
        choices.GroupBackend | None,
        typer.Option(help="How ranks talk to each other: gloo or mpi on CPUs, nccl between GPUs (default: auto)."),
    ] = None
    device: EngineDevice = None
    dtype: EngineDtype = None
    weights: Annotated[choices.WeightPrecision | None, typer.Option(help="How the model's weights lie in memory.")] = (
        None
    )
    weights_over_ranks: Annotated[bool | None, typer.Option("--weights-over-ranks", help=OVER_RANKS)] = None
    host: Host = None
    port: Port = None
    data_dir: DataDir = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `doctor`."""

    config: Config = None
    model: Model = None
    host: Host = None
    port: Port = None
    data_dir: DataDir = None
    device: EngineDevice = None
    dtype: EngineDtype = None
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the exchanges between ranks too, and keep which is fastest.")
    ] = False
    compile_for: Annotated[
        str | None,
        typer.Option(
            "--compile",
            metavar="ARCHITECTURE",
            help="Only compile the models' kernels, for such GPUs (sm_90: H100, H200), into Triton's cache.",
        ),
    ] = None
    as_json: AsJson = False


Options = TypeVar("Options")


def taking(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a typer command of a function that takes one dataclass, whose fields become the command's options."""
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)  # type: ignore[arg-type]
    ]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**values: Any) -> None:
            command(kind(**values))

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = hints
        return called

    return decorate


def sampling_spec(options: GenerateOptions) -> SamplingSpec:
    """Read the drawing options from flags and KEY=VALUE; a value is JSON.

    Raises: InputError for another key, and for a value that is not of its kind.
    """
    rare: dict[str, Any] = {}
    for assignment in options.set_ or ():
        key, _, text = assignment.partition("=")
        if key not in _RARE:
            raise InputError(f"--set {assignment[:80]}: {key!r} is no option of drawing; there are {', '.join(_RARE)}")
        try:
            alone = {"max_tokens": 1, key: msgspec.json.decode(text)}
            rare[key] = getattr(msgspec.convert(alone, SamplingSpec, str_keys=True), key)
        except msgspec.MsgspecError as error:
            raise InputError(f"--set {assignment[:80]} cannot be used: {error}") from None
    return SamplingSpec(**{name: getattr(options, name) for name in _WITH_FLAGS}, **rare)


def chosen_compute(options: EncodeOptions | GenerateOptions | PlanOptions) -> dict[str, bool]:
    """Tell for --device and --dtype whether they were given."""
    return {"device": options.device != "auto", "dtype": options.dtype != "auto"}


def leave_to_service(**flags: bool) -> None:
    """Raises: InputError for flags that settle how the work is done on this machine."""
    for name in (name for name, is_set in flags.items() if is_set):
        raise InputError(f"--{name} and --url were given; how a service does its work is its own choice: leave one out")


# ---- counts --------------------------------------------------------------------------------------

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(\.\d+)?\s?([kmgbt]?)", re.IGNORECASE | re.ASCII)
_LARGEST = 1 << 53  # what JSON readers keep exact
_LONGEST = 64  # characters


def parse_count(text: str, what: str = "tokens") -> int:
    """The whole number, 1 or more, that `text` writes: with k, M, G (or B) or T as powers of 1,000, with _ or commas.

    Raises: InputError for anything else.
    """
    shown = repr(text[:40])
    match = _COUNT.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise InputError(f"{shown} is not a number of {what}; write it like 2M, 500k, 1.5M or 1_000_000")
    digits, fraction, suffix = match.groups()
    value = Decimal(digits.replace("_", "").replace(",", "") + (fraction or "")) * _SUFFIXES[suffix.lower()]
    if value != int(value):
        raise InputError(f"{shown} is {value} {what}; needed is a whole number, like 2M, 500k or 1_000_000")
    if not 1 <= value <= _LARGEST:
        raise InputError(f"{shown} {what} were given; needed are at least 1 and at most 2^53")
    return int(value)

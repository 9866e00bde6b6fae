"""Commands over many documents: `encode-corpus` fills a folder with their rows, `search` finds passages there."""

import json
import os
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from dist_attn.commands.options import AsJson, Device, Dtype, Granularity, Model, Pooling, Window, taking
from dist_attn.errors import InputError
from dist_attn.host_limits import compute_environment, usable_cores
from dist_attn.launchers import ended_in_order
from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Options of `encode-corpus`."""

    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT",
            help="Files, folders and patterns, of text or with it in JSONL or Parquet, then the folder that gets the "
            "rows; s3:// and gs:// too.",
        ),
    ]
    with_text: Annotated[bool, typer.Option("--with-text", help="Write the text of each row beside its vector.")] = (
        False
    )
    granularity: Granularity = "window"
    window: Window = None
    pooling: Pooling = None
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes of this machine, or actors of a Ray cluster.")
    ] = "local"
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster, auto or ray://…; without it Ray starts here.")
    ] = None
    ranks: Annotated[
        int | None,
        typer.Option(help="Workers with a model each (default: one for each GPU, else core).", min=1, max=1 << 16),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="text, id: the fields of JSONL or columns of Parquet with the text and the document's name; "
            "embedding: float32, float16, or int8 times `scale`; part_mib: MiB of input in a part; long_ranks: ranks "
            "on CPUs that share each document of long_mib MiB (256) or more; repeatable.",
        ),
    ] = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    model: Model = None


class RarerOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options by `--set`. Units: MiB of input; `part_mib` is at most 4 where it is not given."""

    text: str = "text"
    id: str = ""
    embedding: Literal["float32", "float16", "int8"] = "float32"
    part_mib: Annotated[float, msgspec.Meta(gt=0, le=1 << 20)] | None = None
    long_mib: Annotated[float, msgspec.Meta(gt=0, le=1 << 20)] = 256
    long_ranks: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0


def _rarer(given: list[str]) -> RarerOptions:
    """Raises: InputError for what cannot be set, and values that do not fit."""
    try:
        return msgspec.convert(dict(one.split("=", 1) for one in given), RarerOptions, strict=False)
    except ValueError as error:
        keys = ", ".join(RarerOptions.__struct_fields__)
        raise InputError(f"--set {' '.join(given)}: {error}; keys are {keys}") from None


@taking(CorpusOptions)
def encode_corpus(options: CorpusOptions) -> None:
    """Turn many documents into Parquet files of vectors; run again, it goes on with those that are missing.

    Example: dist-attn encode-corpus letters/ 'reports/*.txt' rows/

    Example: dist-attn encode-corpus s3://bucket/texts.jsonl s3://bucket/rows --set id=url --engine ray --address auto
    """
    from dist_attn.commands.corpus_engines import LocalEngine, RayEngine
    from dist_attn.commands.corpus_inputs import Location, documents_of, find_files
    from dist_attn.commands.corpus_parts import CorpusSettings
    from dist_attn.commands.corpus_run import encode_corpus as run

    *inputs, out = options.paths
    if not inputs:
        raise InputError(f"{out} was given; needed are documents and then the folder that gets their rows")
    if options.address and options.engine != "ray":
        raise InputError(f"--address {options.address} is for --engine ray: give both, or neither")
    folder = resolve_model_folder(options.model or DEFAULT_ENCODER).resolve()
    place = out if "://" in out else os.path.abspath(out)
    rarer = _rarer(options.set_ or [])
    own = {**vars(options), **msgspec.structs.asdict(rarer), "out": place, "model": str(folder)}
    settings = msgspec.convert(own, CorpusSettings)
    gpus = 0 if options.device == "cpu" else len(list(Path("/dev").glob("nvidia[0-9]*")))
    workers = options.ranks or gpus or usable_cores()

    local = partial(LocalEngine, workers=workers, gpus=gpus)
    ray = partial(RayEngine, workers=workers, address=options.address)
    with ended_in_order():
        files = [one for one in find_files(inputs) if not one[0].real.startswith(f"{Location.of(place).real}/")]
        if not files:
            raise InputError(f"all documents lie in {out}, which gets their rows: give another folder")
        documents = documents_of(files, rarer.text, rarer.id)
        engine = ray if options.engine == "ray" else local
        part_bytes = min(4 << 20, max(1 << 16, sum(size for _, size in files) // (16 * workers)))  # each gets several
        if rarer.part_mib is not None:
            part_bytes = int(rarer.part_mib * (1 << 20))
        long_bytes = max(part_bytes, int(rarer.long_mib * (1 << 20)))  # alone in its part
        settings = msgspec.structs.replace(settings, long_bytes=long_bytes)
        report = run(files, documents, settings, engine, part_bytes)
    print(json.dumps(report | {"model": folder.name}))


def search(
    folder: Annotated[str, typer.Argument(metavar="OUT", help="A folder that `encode-corpus` has filled.")],
    question: Annotated[str, typer.Argument(help="What is looked for.")],
    top_k: Annotated[int, typer.Option(help="Passages to print.", min=1, max=10_000)] = 5,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Find the passages of many documents that answer a question, by their words (--with-text) and by their vectors.

    Example: dist-attn search rows/ "who may sign a contract"
    """
    os.environ |= compute_environment(1)
    from dist_attn.commands.corpus_search import search_corpus

    for rank, row in enumerate(search_corpus(folder, question, model, top_k), 1):
        if as_json:
            print(json.dumps(row))
            continue
        section = f", {row['section']}" if row.get("section") else ""
        print(f"{rank}. {row['doc']}{section}, bytes {row['byte_start']} to {row['byte_stop']} ({row['score']:.3f})")
        print(textwrap.indent(textwrap.fill(textwrap.shorten(row.get("text", ""), 500, placeholder=" …"), 100), "   "))

"""A job of `dist-attn encode-corpus`: documents in units for workers of an engine, which go on from what is there."""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from dist_attn.commands.corpus_engines import Engine, LostError
from dist_attn.commands.corpus_inputs import Document, Location
from dist_attn.commands.corpus_parts import WRITING, CorpusSettings, Unit, UnitReport, batches_of, written
from dist_attn.commands.encode_output import byte_progress
from dist_attn.control.processes import held
from dist_attn.errors import InputError
from dist_attn.shipped import sha256
from dist_attn.wire.choices import Precision

MOST_DOCUMENTS = 512  # of a part
FAILED, MANIFEST = "_failed.parquet", "_manifest.json"


def units_of(
    documents: Iterable[Document], done: Collection[bytes], part_bytes: int, skip: Callable[[int], None]
) -> Iterator[Unit]:
    """Documents in units of about `part_bytes`, without those that are done, whose bytes `skip` gets.

    Where units end does not depend on what is done, so the same job makes the same parts however often it died.
    """
    waiting: list[Document] = []
    size = number = 0

    def unit() -> Iterator[Unit]:
        left = [one for one in waiting if _key(one.name) not in done]
        skip(size - sum(one.size for one in left))
        if left:
            yield _unit(number, left)

    for document in documents:
        if waiting and (size + document.size > part_bytes or len(waiting) == MOST_DOCUMENTS):
            yield from unit()
            waiting, size, number = [], 0, number + 1
        waiting.append(document)
        size += document.size
    yield from unit()


def _once(documents: Iterable[Document], failed: "_Failures") -> Iterator[Document]:
    """The documents but those whose names others have had, which are noted."""
    seen = set[bytes]()
    for document in documents:
        if (key := _key(document.name)) in seen:
            failed.add({document.name: "another document before it has this name, and its rows"})
            continue
        seen.add(key)
        yield document


def _unit(number: int, documents: list[Document]) -> Unit:
    names = "\0".join(one.name for one in documents)
    return Unit(f"part-{number:07d}-{_key(names).hex()}", documents)


def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=12).digest()


def encode_corpus(
    files: Sequence[tuple[Location, int]],
    documents: Iterable[Document],
    settings: CorpusSettings,
    open_engine: Callable[[CorpusSettings], Engine],
    part_bytes: int,
) -> dict[str, Any]:
    """Encode those documents that `settings.out` lacks; the counts. `files` are where they come from.

    Raises: InputError for an output that does not fit, ConfigError where another job writes there, OSError, EngineError
        where workers cannot start or write, MissingExtraError.
    """
    out, began = Location.of(settings.out), time.perf_counter()
    with contextlib.ExitStack() as stack:
        out.filesystem.create_dir(out.path, recursive=True)
        if not out.scheme:
            refusal = f"{out.path} is being written by {{}}: wait for it, or give another folder"
            stack.enter_context(held(Path(out.path, ".lock"), f"process {os.getpid()}", refusal))
            for left in Path(out.path).glob(f".*{WRITING}"):
                left.unlink()
        there = check_manifest(out, settings)
        done = documents_in(out)
        if settings.dtype == "auto":  # goes on in the precision of the rows that are there
            settings = msgspec.structs.replace(settings, dtype=cast(Precision, _precision(there)))
        engine = open_engine(settings)
        stack.callback(engine.close)
        failed = stack.enter_context(contextlib.closing(_Failures(out)))  # they are tried again by the next job
        tell = stack.enter_context(byte_progress("encoding", sum(size for _, size in files)))
        rows = tokens = encoded = 0
        for unit, report in run(engine, _once(documents, failed), done, part_bytes, tell):
            rows, tokens = rows + report.rows, tokens + report.tokens
            encoded += len(unit.documents) - len(report.failed)
            failed.add(report.failed)
            there = _check_precision(out, there, unit, report)
    seconds = time.perf_counter() - began
    counts = {"documents": encoded, "rows": rows, "tokens": tokens, "failed": failed.count, "there_before": len(done)}
    return counts | {"seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds), "workers": engine.size}


def run(
    engine: Engine,
    documents: Iterable[Document],
    done: Collection[bytes],
    part_bytes: int,
    tell: Callable[[int], None],
) -> Iterator[tuple[Unit, UnitReport]]:
    """Have documents encoded; units and their reports as they come. `tell` gets the bytes of input so far.

    A unit whose worker dies is given out again, then in halves, until one document is left that has failed.

    Raises: EngineError.
    """
    again, deaths, busy, finished = deque[Unit](), dict[str, int](), dict[str, int](), 0

    def add(size: int) -> None:
        nonlocal finished
        finished += size

    units = units_of(documents, done, part_bytes, add)
    while True:
        while len(busy) < engine.size and (unit := again.popleft() if again else next(units, None)) is not None:
            engine.submit(unit)
            busy[unit.name] = 0
        tell(finished + sum(busy.values()))
        if not busy:
            return
        unit, answer = engine.wait()
        if not isinstance(answer, LostError) and answer.report is None:
            busy[unit.name] = answer.done
            continue
        del busy[unit.name]
        if not isinstance(answer, LostError):
            add(sum(one.size for one in unit.documents))
            yield unit, answer.report or UnitReport()
            continue
        deaths[unit.name] = deaths.get(unit.name, 0) + 1
        half = len(unit.documents) // 2
        if deaths[unit.name] == 1:
            again.append(unit)
        elif half:
            number = int(unit.name.split("-")[1])
            halves = [_unit(number, some) for some in (unit.documents[:half], unit.documents[half:])]
            deaths |= dict.fromkeys((one.name for one in halves), 1)
            again += halves
        else:
            yield unit, UnitReport(failed={unit.documents[0].name: f"{answer}, and again"})


class _Failures:
    """The table of documents that failed, which gets its name when it is closed; few of its rows are in memory."""

    def __init__(self, out: Location) -> None:
        import pyarrow
        from pyarrow import parquet

        self._target, self._file = out._replace(path=f"{out.path}/{FAILED}"), tempfile.TemporaryFile()  # noqa: SIM115
        self._schema = pyarrow.schema([("doc", pyarrow.string()), ("reason", pyarrow.string())])
        self._writer = parquet.ParquetWriter(self._file, self._schema)
        self._waiting: list[dict[str, str]] = []
        self.count = 0

    def add(self, failed: dict[str, str]) -> None:
        """Note why documents failed."""
        self._waiting += [{"doc": name, "reason": reason} for name, reason in failed.items()]
        self.count += len(failed)
        if len(self._waiting) >= MOST_DOCUMENTS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        self._writer.write_table(pyarrow.Table.from_pylist(self._waiting, self._schema))
        self._waiting = []

    def close(self) -> None:
        """Write the table. Raises: PartError."""
        self._flush()
        self._writer.close()
        self._file.seek(0)
        with self._file, written(self._target) as file:
            shutil.copyfileobj(self._file, file)


def _check_precision(out: Location, there: dict[str, Any], unit: Unit, report: UnitReport) -> dict[str, Any]:
    """Note in the manifest what auto has come to; rows of another precision are removed. Raises: InputError."""
    known = _precision(there)
    if report.computed in ("", known):
        return there
    if known == "auto":
        _write_manifest(out, there := there | {"computed": report.computed})
        return there
    out.filesystem.delete_file(f"{out.path}/{unit.name}.parquet")
    raise InputError(f"{out.name} has rows in {known}, a worker gives {report.computed}: give --dtype {known}")


def _precision(manifest: dict[str, Any]) -> str:
    return str(manifest.get("computed") or manifest.get("dtype"))


def _write_manifest(out: Location, manifest: dict[str, Any]) -> None:
    with written(out._replace(path=f"{out.path}/{MANIFEST}")) as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))


def check_manifest(out: Location, settings: CorpusSettings) -> dict[str, Any]:
    """Hold the settings against those of the rows that are there, which are returned; write them where there are none.

    What auto has come to there, `computed`, stands for it.

    Raises: InputError naming what is another.
    """
    folder = Path(settings.model)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".model"))
    digests = {path.name: sha256(path) for path in files}
    settings = msgspec.structs.replace(settings, long_bytes=0, long_ranks=0)  # who reads a document is no matter
    own: dict[str, Any] = msgspec.to_builtins(settings) | {
        "out": "",
        "device": "",
        "model": folder.name,
        "sha256": digests,
    }
    there = read_manifest(out)
    if there is None:
        if parts_of(out):
            raise InputError(f"{out.name} has rows and no {MANIFEST}: give another folder")
        _write_manifest(out, own)
        return own
    if own["dtype"] == _precision(there) or "auto" in (own["dtype"], _precision(there)):
        own |= {name: there[name] for name in ("dtype", "computed") if name in there}
    if other := [name for name in sorted(own.keys() | there.keys()) if own.get(name) != there.get(name)]:
        said = ", ".join(f"{name} {there.get(name)} there, {own.get(name)} now" for name in other)
        raise InputError(f"{out.name} has rows of another model or other settings ({said[:500]}): give another folder")
    return there


def read_manifest(out: Location) -> dict[str, Any] | None:
    """The manifest of a folder of rows; None where there is none. Raises: InputError for one that is damaged."""
    try:
        with out.filesystem.open_input_stream(f"{out.path}/{MANIFEST}") as file:
            return msgspec.json.decode(file.read(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{out.name}/{MANIFEST} cannot be read: {error}") from None


def parts_of(out: Location) -> list[Location]:
    """The parts of a folder, in order."""
    return [place for place, _ in out.files() if place.path.startswith(f"{out.path}/part-")]


def documents_in(out: Location) -> set[bytes]:
    """The keys of the documents that have rows. Raises: InputError for a part that cannot be read."""
    batches = (batch for part in parts_of(out) for batch in batches_of(part, ["doc"]))
    return {_key(name) for batch in batches for name in batch.column(0).unique().to_pylist()}

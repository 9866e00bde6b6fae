"""A worker of `dist-attn encode-corpus`: one model, which makes one file of rows of some documents at a time.

    python -m dist_attn.commands.corpus_encode

takes settings and then units on stdin, a JSON object on each line, and answers each unit on stdout: bytes of input as
they are read, then a report. Ray's actors are the same class.
"""

import contextlib
import itertools
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, final

import msgspec
import numpy as np
import torch

from dist_attn.checkpoints import fuses_on_cpus, load_reader_and_tokeniser
from dist_attn.comm import open_communicator
from dist_attn.commands.corpus_inputs import Document, Location, open_document
from dist_attn.commands.corpus_parts import (
    CorpusSettings,
    PartWriter,
    Unit,
    UnitReport,
    WorkerAnswer,
    batches_of,
    vectors_of,
    written,
)
from dist_attn.commands.encode_blocks import encode_blocks, read_together, short_tokens
from dist_attn.commands.encode_file import RowsOfText, block_tokens, reader_of, rows_for, token_blocks
from dist_attn.commands.row_files import RANGES, FileRows
from dist_attn.devices import choose_compute
from dist_attn.errors import DistAttnError, InputError, WireError
from dist_attn.models import StreamEncoder
from dist_attn.models.text_encoder import TextEncoder
from dist_attn.ops.processor import denormals_flushed
from dist_attn.rank_link.rows import RowAssembler
from dist_attn.text.base import TokenArray
from dist_attn.text.cuts import CutFinder
from dist_attn.text.documents import sections_at
from dist_attn.wire.rank_messages import RowPieces

Tell = Callable[[int], None]
STALLED_S = 1500.0  # without progress of ranks; engines wait longer for a worker


@final
class _Text:
    """One document: its blocks of tokens, of which the first has been read, and its rows as pieces of them come."""

    def __init__(self, document: Document, encoder: "CorpusEncoder", tell: Tell) -> None:
        spec, self.name = encoder.spec, document.name
        self._file, sections = open_document(document)
        self._seen = RowsOfText(spec, sections, with_text=encoder.settings.with_text)
        self._assembler = RowAssembler(spec, encoder.dim)
        finder = CutFinder(spec.granularity) if spec.marked else None
        blocks = token_blocks(self._file, encoder.tokeniser, encoder.block, tell, finder, self._seen)
        self.first = next(blocks, np.empty(0, dtype=np.int32))
        if not len(self.first):
            raise InputError("the tokeniser makes no tokens of it")
        if len(self.first) < encoder.block:  # the end
            self._file.close()
            blocks = iter(())
        self.blocks = itertools.chain([self.first], blocks)

    def rows(self, pieces: Iterable[RowPieces]) -> Iterator[FileRows]:
        """The rows of the text's pieces."""
        for each in pieces:
            yield from map(self._seen.of, self._assembler.add(each, None))
        yield from map(self._seen.of, self._assembler.finish(self._assembler.position))
        self._file.close()


@final
class CorpusEncoder:
    """The encoder of a worker, made once: it loads the model and its tokeniser.

    Raises: ModelFolderError, ConfigError, InputError as `encode` does.
    """

    _done = 0

    def __init__(self, settings: bytes) -> None:
        own = self.settings = msgspec.json.decode(settings, type=CorpusSettings)
        self._compute = choose_compute(own.device, own.dtype, fused=fuses_on_cpus(own.model))
        self._ranks = own.long_ranks if self._compute.device.type == "cpu" else 1
        self._model, self.tokeniser = load_reader_and_tokeniser(Path(own.model))
        self.spec = rows_for(self._model, own.granularity, own.window, own.pooling)
        self._model.to(self._compute.device)
        if isinstance(self._model, StreamEncoder | TextEncoder):
            with self._compute.autocast():
                self._model.pack_weights()
        self._comm = open_communicator("local")
        reader = reader_of(self._comm, self._model, self.spec)
        self.dim, self.block = reader.dim, block_tokens(self._comm, reader)
        try:
            with torch.inference_mode():
                self._together([np.zeros(1, dtype=np.int32)] * 2)
            self._short = short_tokens(self._model, self.spec)
        except InputError:  # a mixer that takes no packed documents
            self._short = 0

    def done(self) -> int:
        """The bytes of input that have been read of a unit, where `encode` has nobody to tell."""
        return self._done

    def _note(self, done: int) -> None:
        self._done = done

    @torch.inference_mode()
    def encode(self, data: bytes, tell: Tell | None = None) -> bytes:
        """Write the file of a unit's rows; the report.

        Raises: PartError where it cannot be written; what a document raises of which rows were written.
        """
        unit, failed, done = msgspec.json.decode(data, type=Unit), dict[str, str](), 0
        self._done, tell = 0, tell or self._note
        waiting: list[_Text] = []
        out = Location.of(self.settings.out)
        with (
            denormals_flushed(),
            self._compute.autocast(),
            written(out._replace(path=f"{out.path}/{unit.name}.parquet")) as file,
            contextlib.closing(PartWriter(file, self.settings)) as part,
        ):
            for document in unit.documents:
                with _noting(document.name, part, failed):
                    so_far = partial(_add, tell, done)
                    if self._ranks > 1 and document.size >= self.settings.long_bytes:
                        part.write_document(document.name, _over_ranks(document, self.settings, so_far))
                    elif len((text := _Text(document, self, so_far)).first) <= self._short:
                        waiting.append(text)
                    else:
                        part.write_document(text.name, text.rows(self._pieces(text)))
                done += document.size
                tell(done)
                if sum(len(one.first) for one in waiting) >= self.block:
                    self._write_short(waiting, part, failed)
            self._write_short(waiting, part, failed)
            if part.rows:
                part.finish()
        computed = str(self._compute.dtype).removeprefix("torch.") if part.rows else ""
        return msgspec.json.encode(UnitReport(part.rows, part.tokens, failed, computed))

    @torch.inference_mode()
    def rows_of(self, text: str) -> FileRows:
        """The first rows of a text. Raises: InputError for one without tokens."""
        with denormals_flushed(), self._compute.autocast():
            read = _Text(Document("", 0, text=text), self, lambda _: None)
            return next(read.rows(self._pieces(read)))

    def _pieces(self, text: _Text) -> Iterator[RowPieces]:
        """The pieces of a text that is read alone, as `encode` reads it."""
        blocks = encode_blocks(self._comm, reader_of(self._comm, self._model, self.spec), text.blocks)
        return itertools.chain.from_iterable(block.pieces for block in blocks)

    def _together(self, texts: list[TokenArray]) -> list[RowPieces]:
        return read_together(self._model, texts, self.spec, self._compute.device)

    def _write_short(self, waiting: list[_Text], part: PartWriter, failed: dict[str, str]) -> None:
        """Write the rows of texts of one block each, which are read together where there are several."""
        read: Iterable[Iterable[RowPieces]] = map(self._pieces, waiting)
        if len(waiting) > 1:
            read = [[one] for one in self._together([text.first for text in waiting])]
        for text, pieces in zip(waiting, read, strict=True):
            with _noting(text.name, part, failed):
                part.write_document(text.name, text.rows(pieces))
        waiting.clear()


def _add(tell: Tell, before: int, read: int) -> None:
    tell(before + read)


def _over_ranks(document: Document, own: CorpusSettings, tell: Tell) -> Iterator[FileRows]:
    """The rows of a document that `dist-attn encode --ranks` reads. Raises: InputError with its last words."""
    names = ("granularity", "window", "pooling", "model", "device", "dtype")
    flags = [f"--{name}={value}" for name in names if (value := getattr(own, name)) is not None]
    text, sections = open_document(document)
    with text, tempfile.TemporaryDirectory() as folder:
        rows, near, words = Path(folder, "rows.parquet"), Path(folder, "text"), Path(folder, "words")
        if Location.of(document.uri).scheme:  # ranks wait for 30 s, and a bucket may be slower
            with near.open("wb") as copy:
                shutil.copyfileobj(text, copy, 1 << 20)
        tied = [sys.executable, "-P", "-m", "dist_attn.rank_link.tether", str(os.getpid())]
        command = [*tied, sys.executable, "-P", "-m", "dist_attn", "encode", *flags, f"--ranks={own.long_ranks}"]
        command += [f"--out={rows}", *["--with-text"] * own.with_text, "--", "/dev/stdin"]
        with near.open("rb") if near.exists() else text as source, words.open("wb") as said:
            code = _fed(command, source, said, tell)
        if code:
            last = words.read_text(errors="replace").strip().rpartition("\n")[2]
            raise InputError(last or f"encode ended with {code}")
        for batch in batches_of(Location.of(str(rows)), [*RANGES, "text", "embedding"]):
            has = {name: batch.column(name) for name in batch.schema.names}
            ranges_N4 = np.column_stack([has[name].to_numpy() for name in RANGES])
            texts = has["text"].to_pylist() if own.with_text else None
            named = sections_at(sections, ranges_N4[:, 2]) if sections else None
            yield FileRows(ranges_N4, vectors_of(batch), texts, named)


def _fed(command: Sequence[str], text: IO[bytes], said: IO[bytes], tell: Tell) -> int:
    """The exit code of a command that reads `text`; `tell` gets the bytes that it has taken. Raises: InputError."""
    pipe, poll, sent = subprocess.PIPE, select.poll(), 0
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=said, bufsize=0) as process:
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        poll.register(process.stdin, select.POLLOUT)
        try:
            with process.stdin as into, contextlib.suppress(BrokenPipeError):  # its last words say why
                while piece := text.read(1 << 16):
                    while piece:
                        if not poll.poll(1000 * STALLED_S):
                            raise subprocess.TimeoutExpired(command, STALLED_S)
                        taken = into.write(piece) or 0
                        piece, sent = piece[taken:], sent + taken
                    tell(sent)
            return process.wait(STALLED_S)
        except subprocess.TimeoutExpired:
            raise InputError(f"its ranks made no progress for {STALLED_S:g} s") from None
        finally:
            process.kill()


@contextlib.contextmanager
def _noting(document: str, part: PartWriter, failed: dict[str, str]) -> Iterator[None]:
    """Note a document that cannot be read, with the reason; raise it where some of its rows are in the file."""
    try:
        yield
    except (InputError, WireError, OSError, ValueError) as error:
        failed[document] = " ".join(str(error).split())[:1000]
        if not part.drop(document):
            raise RuntimeError(f"{document}: {error}") from error


def main() -> None:
    """Answer the units of stdin on stdout."""
    lines, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer

    def say(answer: WorkerAnswer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    try:
        encoder = CorpusEncoder(lines.readline())
        say(WorkerAnswer())  # what ends it from now on is a unit's fault
        for line in lines:
            report = encoder.encode(line, lambda done: say(WorkerAnswer(done)))
            say(WorkerAnswer(report=msgspec.json.decode(report, type=UnitReport)))
    except (DistAttnError, OSError) as error:  # of the model or the disk; what else ends it is one unit's fault
        say(WorkerAnswer(error=str(error)))


if __name__ == "__main__":
    main()

"""`dist-attn encode`: one file over all ranks, block by block, in memory that does not grow with the file."""

import contextlib
import io
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt
import torch

from dist_attn.checkpoints import fuses_on_cpus, load_reader_and_tokeniser
from dist_attn.comm import Communicator, open_communicator
from dist_attn.commands.encode_blocks import (
    BlockReader,
    Seconds,
    SequenceReader,
    StreamReader,
    WholeReader,
    encode_blocks,
)
from dist_attn.commands.encode_output import byte_progress, file_of
from dist_attn.commands.options import EncodeOptions
from dist_attn.commands.row_files import About, FileRows, RowsWriter, open_rows
from dist_attn.devices import Compute, choose_compute
from dist_attn.errors import InputError
from dist_attn.model_config.figures import BLOCK_TOKENS, tokens_at_once
from dist_attn.models import SequenceModel, StreamEncoder, StreamingModel, TextEncoder
from dist_attn.ops.processor import denormals_flushed
from dist_attn.ops.whole_vectors import RowBlocks
from dist_attn.rank_link.heartbeat import peak_rss_bytes
from dist_attn.rank_link.rows import RowAssembler, RowBatch
from dist_attn.sharded import Algorithm
from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder
from dist_attn.text import Tokeniser
from dist_attn.text.base import TokenArray
from dist_attn.text.byte_offsets import ByteOffsets
from dist_attn.text.cuts import CutFinder
from dist_attn.text.documents import Extracted, Section, open_text, sections_at
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.specs import SequenceReading, choose_rows

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "EncodeReport",
    "RowsOfText",
    "block_tokens",
    "encode_file",
    "encode_here",
    "reader_of",
    "rows_for",
    "token_blocks",
]

_READ_BYTES = 1 << 18
_READ_TURN_S = 0.5


@dataclass(frozen=True)
class EncodeReport:
    """The costs of an encoding; `carry_bytes_per_rank` is what rank 0 contributed to the last block's carry exchange.

    Of the ring exchanges it is all that rank 0 passed on in that block. The time of rank 0 is divided as `plan` divides
    it (see `encode_blocks.Seconds`); what is left of `seconds` is opening and writing files.
    """

    tokens: int
    rows: int
    seconds: float
    tokens_per_second: float
    ranks: int
    backend: str
    peak_rss_mib: list[float]
    carry_bytes_per_rank: int
    compute_seconds: float
    exchange_seconds: float
    text_seconds: float
    handing_seconds: float


@dataclass(frozen=True)
class Encoding:
    """One file to encode: `source` is the text, `target` the file of its rows, whose ending says their format.

    `with_text` puts the text of each row there too; `model` is the model's name, which some formats keep.

    `exchange` is how states travel between ranks; it changes nothing but the time and the last bits. `deterministic`
    gives the same bytes for any number of ranks with equally many threads; it is slower.
    """

    source: Path
    target: Path
    spec: RowSpec
    deterministic: bool = False
    exchange: Algorithm = "auto"
    with_text: bool = False
    model: str = ""

    @property
    def about(self) -> About:
        """The description of the rows that their file carries."""
        spec = self.spec
        window = {"window": str(spec.window)} if spec.granularity == "window" else {}
        metadata = {"model": self.model, "granularity": spec.granularity, **window, "pooling": spec.pooling}
        return About(str(self.source), self.with_text, metadata)


def encode_here(options: EncodeOptions) -> dict[str, Any] | None:
    """Write the rows of a file; the report in plain values on rank 0, None elsewhere.

    Raises: InputError, ModelFolderError, CommError; as `encode_file`.
    """
    folder = resolve_model_folder(options.model or DEFAULT_ENCODER)
    compute = _compute(options, folder)
    loaded, tokeniser = load_reader_and_tokeniser(folder)
    spec = rows_for(loaded, options.granularity, options.window, options.pooling)
    encoding = Encoding(
        options.file, options.out, spec, options.deterministic, options.exchange, options.with_text, folder.name
    )
    with open_communicator(device=compute.device) as comm, compute.autocast():
        loaded.to(compute.device)
        # Deterministic products are computed in blocks of their own, whatever the number of processes.
        if isinstance(loaded, StreamEncoder | TextEncoder) and not options.deterministic:
            loaded.pack_weights()

        def begun() -> None:
            if comm.rank == 0:
                print(compute.sentence(comm), file=sys.stderr)

        # Not Path.is_file, which raises for some names: the encoder refuses them with its own words.
        size = options.file.stat().st_size if os.path.isfile(options.file) else 0
        with byte_progress("encoding", size, enabled=comm.rank == 0) as on_progress:
            report = encode_file(comm, loaded, tokeniser, encoding, on_progress, begun)
    return None if report is None else {**asdict(report), "model": folder.name}


def rows_for(
    model: StreamingModel | TextEncoder | SequenceModel, granularity: str, window: int | None, pooling: str | None
) -> RowSpec:
    """Choose a model's rows. Raises: as `choose_rows`."""
    reading = None
    if isinstance(model, TextEncoder):
        reading = SequenceReading(model.config.text_tokens, model.config.pooling)
    return choose_rows(granularity, window, pooling, reading)


def reader_of(
    comm: Communicator,
    model: StreamingModel | TextEncoder | SequenceModel,
    spec: RowSpec,
    *,
    exchange: Algorithm = "auto",
    deterministic: bool = False,
) -> BlockReader:
    """Make the reader of a text by this kind of model. Raises: InputError for one that cannot be `deterministic`."""
    if isinstance(model, TextEncoder):
        return SequenceReader(comm, model, spec, deterministic=deterministic)
    if isinstance(model, SequenceModel):
        return WholeReader(comm, model, spec, deterministic=deterministic)
    return StreamReader(comm, model, spec, exchange=exchange, deterministic=deterministic)


def _compute(options: EncodeOptions, folder: Path) -> Compute:
    """Raises: ConfigError as `choose_compute`; InputError for a GPU, whose sums depend on how a text is cut."""
    if options.deterministic and options.device.startswith("cuda"):
        raise InputError(
            f"--deterministic and --device {options.device} were given; the same bytes by any number of processes come "
            "from CPUs alone: leave one out"
        )
    if options.deterministic:
        return choose_compute("cpu", options.dtype)
    return choose_compute(options.device, options.dtype, fused=fuses_on_cpus(folder))


@torch.inference_mode()
def encode_file(
    comm: Communicator,
    model: StreamingModel | TextEncoder | SequenceModel,
    tokeniser: Tokeniser,
    encoding: Encoding,
    on_progress: Callable[[int], None] = lambda _: None,
    begun: Callable[[], None] = lambda: None,
) -> EncodeReport | None:
    """Write the rows of a file; the report on rank 0, None elsewhere.

    Rank 0 reads and tokenises, each block is split over all ranks, the state goes on from block to block. A text
    encoder reads sequences that stand alone, a row's window each or as much as it can, and a model of sequences all of
    the text, up to its `max_tokens` at once. `on_progress` gets the bytes read so far; `begun` is called once the files
    are open. The target appears only when it is complete.

    Raises: InputError for a file that cannot be read or is empty (on every rank, before anything is exchanged), or a
        model that cannot be `deterministic`.
    """
    started = time.perf_counter()
    spec, deterministic = encoding.spec, encoding.deterministic
    reader = reader_of(comm, model, spec, exchange=encoding.exchange, deterministic=deterministic)
    tokens, carry_bytes, spent = 0, 0, Seconds()
    with contextlib.ExitStack() as stack:
        stack.enter_context(denormals_flushed())
        if deterministic:
            stack.enter_context(RowBlocks())
        text, file = _open_together(comm, stack, encoding)
        seen = RowsOfText(spec, [] if text is None else text.sections, with_text=encoding.with_text)
        finder = CutFinder(spec.granularity) if spec.marked else None
        blocks = None
        if text is not None:
            blocks = token_blocks(text.file, tokeniser, block_tokens(comm, reader), on_progress, finder, seen)
        begun()
        assembler = RowAssembler(spec, reader.dim)
        for block in encode_blocks(comm, reader, blocks):
            for pieces in block.pieces:
                _write(file, seen, assembler.add(pieces, None))
            tokens, carry_bytes, spent = tokens + block.tokens, block.carry_bytes, spent + block.seconds
        if file is not None:
            _write(file, seen, assembler.finish(tokens))
            file.finish()
    seconds = time.perf_counter() - started
    peaks = comm.all_gather(torch.tensor([peak_rss_bytes() / (1 << 20)], dtype=torch.float64))[:, 0].tolist()
    if file is None:
        return None
    return EncodeReport(
        tokens=tokens,
        rows=file.rows,
        seconds=round(seconds, 3),
        tokens_per_second=round(tokens / seconds, 1),
        ranks=comm.size,
        backend=comm.backend,
        peak_rss_mib=[round(peak, 1) for peak in peaks],
        carry_bytes_per_rank=carry_bytes,
        compute_seconds=round(spent.compute, 3),
        exchange_seconds=round(spent.exchange, 3),
        text_seconds=round(spent.text, 3),
        handing_seconds=round(spent.handing, 3),
    )


@final
class RowsOfText:
    """The bytes that rows stand for, and their text where it is asked for, kept only for rows to come."""

    def __init__(self, spec: RowSpec, sections: list[Section], *, with_text: bool) -> None:
        self._sections = sections
        self._offsets = ByteOffsets(spec)
        self._marked = spec.marked
        self._text = bytearray() if with_text else None
        self._base = 0  # where it begins

    def read(self, piece: bytes) -> None:
        """Take the next bytes."""
        if self._text is not None:
            self._text += piece

    def push(self, tokens: TokenArray, byte_lengths: npt.NDArray[np.int64]) -> None:
        """Take the next tokens."""
        self._offsets.push(byte_lengths, tokens if self._marked else None)

    def of(self, batch: RowBatch) -> FileRows:
        """The next rows, with their ranges and texts.

        A character that a token's edge cuts in two is replaced in both texts.
        """
        ends = self._offsets.ranges(batch.starts.tolist(), batch.stops.tolist())
        ranges_N4 = np.column_stack((batch.starts, batch.stops, np.array(ends, dtype=np.int64).reshape(-1, 2)))
        texts = None
        if self._text is not None:
            base = self._base
            texts = [self._text[begin - base : end - base].decode(errors="replace") for begin, end in ends]
            self._base = ends[-1][1]
            del self._text[: self._base - base]
        sections = sections_at(self._sections, (begin for begin, _ in ends)) if self._sections else None
        return FileRows(ranges_N4, batch.vectors, texts, sections)


def _open_together(
    comm: Communicator, stack: contextlib.ExitStack, encoding: Encoding
) -> tuple[Extracted | None, RowsWriter | None]:
    """The text and the rows' file on rank 0, nothing elsewhere; what rank 0 cannot open, every rank raises."""
    problem, text, file = "", None, None
    if comm.rank == 0:
        try:
            text = _open_text(encoding.source)
            stack.enter_context(text.file)
            make = partial(open_rows, encoding.target, encoding.about)
            file = stack.enter_context(file_of(encoding.target, encoding.source, make))
        except InputError as error:
            problem = str(error)
    note = torch.frombuffer(bytearray(problem.encode()[:1024].ljust(1024, b"\0")), dtype=torch.uint8)
    words = bytes(comm.broadcast(note, 0).tolist()).rstrip(b"\0").decode(errors="replace")
    if words:
        raise InputError(words)
    return text, file


def block_tokens(comm: Communicator, reader: BlockReader) -> int:
    """Tokens of a block: some for each rank, in whole grains; of a sequence that lies over all ranks, all of it."""
    if isinstance(reader, WholeReader):
        return reader.grain
    of_rank = tokens_at_once(reader.device.type, BLOCK_TOKENS)
    return max(1, comm.size * of_rank // reader.grain) * reader.grain


class _WaitingFile(io.FileIO):
    """A file, or a pipe that is waited for in short turns.

    A signal that comes just before a blocking read is handled only after it; between turns it always is.
    """

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        while not select.select([self], [], [], _READ_TURN_S)[0]:
            pass
        return super().readinto(buffer)


def _open_text(source: Path) -> Extracted:
    try:
        return open_text(_WaitingFile(source), source.name, piped=not os.path.isfile(source))
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"{source} {error}") from None


def token_blocks(
    text: IO[bytes],
    tokeniser: Tokeniser,
    size: int,
    on_progress: Callable[[int], None],
    finder: CutFinder | None,
    seen: RowsOfText,
) -> Iterator[np.ndarray]:
    """The text's tokens in blocks of `size`, marked by the finder where there is one; the last block is shorter."""
    tail, waiting, read, gap = b"", np.empty(0, dtype=np.int32), 0, 0
    while True:
        piece = text.read(_READ_BYTES)
        read += len(piece)
        seen.read(piece)
        tokens, ends, consumed = tokeniser.encode_with_ends(tail + piece, final=not piece)
        tail = (tail + piece)[consumed:]
        lengths = np.diff(ends, prepend=-gap)
        gap = consumed - int(ends[-1]) if len(ends) else gap + consumed
        if finder is not None:
            finder.push(piece, final=not piece)
            tokens, lengths = finder.mark(tokens, lengths, final=not piece)
        seen.push(tokens, lengths)
        waiting = np.concatenate([waiting, tokens])
        while len(waiting) >= size or (not piece and len(waiting)):
            block, waiting = waiting[:size], waiting[size:]
            yield block
            on_progress(read)
        if not piece:
            return


def _write(file: RowsWriter | None, seen: RowsOfText, batches: list[RowBatch]) -> None:
    """Only rank 0 has a file, and rows."""
    if file is not None:
        for batch in batches:
            file.write(seen.of(batch))

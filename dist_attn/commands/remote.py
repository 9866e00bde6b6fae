"""Commands on a running service (`--url`, `top`), by the HTTP client; never loads torch."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

import msgspec
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dist_attn.commands.encode_output import bytes_progress, file_of
from dist_attn.commands.options import EncodeOptions, parse_count
from dist_attn.commands.row_files import About, FileRows, open_rows
from dist_attn.commands.tables import Table, byte_size, duration, print_tables, rich_table
from dist_attn.errors import InputError
from dist_attn.text.plain import HEAD_BYTES, extracted_as
from dist_attn.wire.messages import SamplingSpec
from dist_attn_client import Client, ClientError, EngineStatus, Estimate, KeyRefused, Retry, Row, Status
from dist_attn_client.sources import DOCUMENTS
from dist_attn_client.texts import Sampling

KEY_VARIABLE = "DIST_ATTN_API_KEY"
FIRST_ANSWER_S = 30.0


def key_of_environment() -> str | None:
    """The key for services from the environment; other users of a machine can see the flags of a command."""
    return os.environ.get(KEY_VARIABLE) or None


def reached(url: str) -> Client:
    """Connect to a service that has answered once: a wrong address or key is told at once, not after all tries.

    Raises: InputError for a URL that is none, KeyRefused, Unreachable, ClientError.
    """
    key = key_of_environment()
    with Client(url, key=key, retry=Retry(tries=1), silence_s=FIRST_ANSWER_S) as first:
        first.models()
    return Client(url, key=key)


def encode_remotely(url: str, options: EncodeOptions) -> dict[str, Any]:
    """Write the rows that a service makes of a file; returns a report in plain values.

    A lost connection goes on with the next row. The target appears only when it is complete.

    Raises: InputError for a file that cannot be read or written, ClientError.
    """
    started = time.perf_counter()
    source = options.file
    size, document = 0, source.suffix.lower() in DOCUMENTS
    if os.path.isfile(source):
        with source.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if extracted_as(opened.read(HEAD_BYTES)) and not document:
                raise InputError(f"{source} is a document: let its name end with one of {', '.join(DOCUMENTS)}")
    if options.with_text and (document or not os.path.isfile(source)):
        why = "the service takes out the text of" if document else "nothing can be read twice of"
        raise InputError(f"--with-text and --url were given, and {why} {source}: leave one out")
    asked = {"model": options.model, "granularity": options.granularity, "window": options.window}
    asked["pooling"] = options.pooling
    about = About(str(source), options.with_text, {name: str(value) for name, value in asked.items() if value})
    make = partial(open_rows, options.out, about)
    with reached(url) as client, file_of(options.out, source, make) as rows, ExitStack() as stack:
        text = stack.enter_context(source.open("rb")) if options.with_text else None
        with bytes_progress(("sending", "encoding"), size) as (sent, encoded):
            stream = client.encode(
                source,
                granularity=options.granularity,
                window=options.window,
                pooling=options.pooling,
                model=options.model,
                on_progress=lambda progress: sent(progress.sent_bytes),
            )
            for row in stream:
                rows.write(_one_row(row, text, document=document))
                encoded(row.byte_stop)
        rows.finish()
    seconds = time.perf_counter() - started
    return {
        "tokens": stream.end.tokens,
        "rows": rows.rows,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(stream.end.tokens / seconds, 1),
        "model": stream.end.model,
        "url": url,
    }


def _one_row(row: Row, text: IO[bytes] | None, *, document: bool) -> FileRows:
    ranges_N4, words = np.array([[row.start, row.stop, row.byte_start, row.byte_stop]], dtype=np.int64), None
    if text is not None:
        text.seek(row.byte_start)
        words = [text.read(row.byte_stop - row.byte_start).decode(errors="replace")]
    return FileRows(ranges_N4, row.embedding[None], words, [row.section] if document else None)


def generate_remotely(
    url: str, prompt: bytes, spec: SamplingSpec, *, model: str | None, on_text: Callable[[str], None]
) -> dict[str, Any]:
    """Let a service continue a text; returns a report in plain values. `on_text` gets each piece as it is drawn.

    Raises: InputError for a prompt that is no UTF-8, ClientError.
    """
    try:
        text = prompt.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt is no UTF-8 (byte {error.start}), and a service takes texts only") from None
    # The API's options have the names of the fields; those at their defaults are left out.
    options: Sampling = msgspec.to_builtins(spec, str_keys=True)
    if model is not None:
        options["model"] = model
    started, parts, reason = time.perf_counter(), [], ""
    with reached(url) as client, client.stream(text, **options) as stream:
        for piece in stream:
            parts.append(piece.text)
            on_text(piece.text)
            reason = piece.finish_reason or reason
    seconds = time.perf_counter() - started
    count = stream.end.usage.completion_tokens
    return {
        "text": "".join(parts),
        "tokens": count,
        "finish_reason": reason,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(count / seconds, 1),
        "model": stream.end.model,
        "url": url,
    }


def plan_remotely(url: str, tokens: str, *, model: str | None, as_json: bool) -> None:
    """Print a running service's estimate of what reading `tokens` (like 2M) would cost it now.

    Raises: InputError for a count that cannot be read, ClientError.
    """
    with reached(url) as client:
        estimate = client.estimate(tokens=parse_count(tokens), model=model)
    if as_json:
        print(json.dumps(_as_object(estimate)))
        return
    ranks = "ranks that are not known" if estimate.ranks is None else f"{estimate.ranks} ranks"
    time_rows = [
        ("reading", *_bounds(estimate.seconds.value, estimate.seconds.low, estimate.seconds.high)),
        ("waiting for other work", duration(estimate.queue_seconds), "", ""),
        ("together", *_bounds(estimate.total_seconds.value, estimate.total_seconds.low, estimate.total_seconds.high)),
    ]
    tables = [Table(f"Time ({estimate.seconds.source})", time_rows, ("", "likely", "at least", "at most"))]
    if estimate.memory_bytes_per_rank is not None:
        memory = _as_object(estimate)["memory_bytes_per_rank"]
        tables.append(Table("Memory per rank", [(name, byte_size(count)) for name, count in memory.items()]))
    formats = [(name, byte_size(count)) for name, count in estimate.output_bytes.items()]
    tables.append(Table(f"Output ({estimate.rows:,} rows)", formats))
    heading = f"{estimate.tokens.value:,.0f} tokens on {ranks} with {estimate.model} at {url}"
    print_tables(heading, tables, estimate.notes)


def _bounds(*seconds: float) -> tuple[str, ...]:
    return tuple(map(duration, seconds))


def _as_object(estimate: Estimate) -> dict[str, Any]:
    numbers: dict[str, Any] = msgspec.to_builtins(estimate)
    return numbers


EVERY_S = 1.0
PATIENCE_S = 5.0
LATE_S = 2.0  # a heartbeat that is older is shown as late
FIGURES = (
    "model", "backend", "epoch", "step", "queued", "sessions", "tokens_per_second", "open_requests", "waiting_requests",
    "spool_bytes", "stored_sessions", "stored_states", "stored_bytes", "lost_groups", "replayed_tokens",
    "uptime_seconds", "version",
)  # fmt: skip
OF_ENGINES = [name for name in FIGURES if name in EngineStatus.__dataclass_fields__]


@dataclass(frozen=True)
class Look:
    """The status that a service answered, or the problem why it did not."""

    status: Status | None
    problem: str = ""


def top(url: str, *, once: bool, as_json: bool, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a service's status every second until Ctrl-C, or once.

    On a terminal a live table; elsewhere lines of names and values with tabs between them, a block for each look and a
    blank line after it; with `as_json` one object per look. A service that is away is waited for, unless `once`.

    Raises: InputError for a URL that is none, KeyRefused, and with `once` any ClientError.
    """
    terminal = sys.stdout.isatty()
    console = Console(highlight=False)  # without colours where NO_COLOR is set
    with Client(url, key=key_of_environment(), retry=Retry(tries=1), silence_s=PATIENCE_S) as client:
        looks = _looks(client, once=once, sleep=sleep)
        try:
            if as_json or not terminal:
                for look in looks:
                    print(_json_line(look) if as_json else "\n".join(plain_lines(look)) + "\n", flush=True)
            elif once:
                console.print(_screen(url, next(looks)))
            else:
                with Live(console=console, auto_refresh=False, screen=True) as live:
                    for look in looks:
                        live.update(_screen(url, look), refresh=True)
        except KeyboardInterrupt:
            if once:
                raise


def _looks(client: Client, *, once: bool, sleep: Callable[[float], None]) -> Iterator[Look]:
    while True:
        try:
            look = Look(client.status(deadline_s=PATIENCE_S))
        except KeyRefused:
            raise
        except ClientError as error:
            if once:
                raise
            look = Look(None, str(error))
        yield look
        if once:
            return
        sleep(EVERY_S)


def plain_lines(look: Look) -> list[str]:
    """Lines of names and values with tabs between them; a rank's line has names and values in turn.

    Lines of the encoder's engine come last, each with `encoder.` before it.
    """
    if look.status is None:
        return ["ready\tno", f"reason\t{_line(look.problem)}"]
    lines = _engine_lines(look.status, FIGURES)
    if (encoder := look.status.encoder) is not None:
        lines += [f"encoder.{line}" for line in _engine_lines(encoder, OF_ENGINES)]
    return lines


def _engine_lines(engine: EngineStatus, figures: Sequence[str]) -> list[str]:
    lines = [f"ready\t{'yes' if engine.ready else 'no'}", f"reason\t{_line(engine.reason)}"]
    lines += [f"{name}\t{_value(getattr(engine, name))}" for name in figures]
    for rank in engine.ranks:
        fields = asdict(rank)
        lines.append("\t".join(f"{name}\t{_value(value) or '-'}" for name, value in fields.items()))
    return lines


def _json_line(look: Look) -> str:
    if look.status is None:
        return json.dumps({"ready": False, "reason": look.problem})
    return json.dumps(msgspec.to_builtins(look.status))


def _line(text: str) -> str:
    return " ".join(text.split())


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else _line(str(value))


def _screen(url: str, look: Look) -> RenderableType:
    status = look.status
    head = Text(f"dist-attn at {url}  ", style="bold")
    if status is None:
        return Group(head, Text(look.problem, style="red"), Text("waiting for it …", style="dim"))
    head.append("ready" if status.ready else f"not ready: {status.reason}", style="green" if status.ready else "red")
    facts = [
        ("open requests", f"{status.open_requests:,} ({status.waiting_requests:,} waiting)"),
        ("stored sessions", f"{status.stored_sessions:,} ({byte_size(status.stored_bytes)})"),
        ("up", duration(status.uptime_seconds)),
    ]
    parts: list[RenderableType] = [head, *_engine_parts(status, facts)]
    if status.encoder is not None:
        parts += _engine_parts(status.encoder, [])
    parts.append(Text(f"Ctrl-C ends it; a key goes into {KEY_VARIABLE}", style="dim"))
    return Group(*parts)


def _engine_parts(engine: EngineStatus, more: list[tuple[str, str]]) -> list[RenderableType]:
    """A model, the figures of its engine with `more` behind them, and its ranks."""
    speed = "-" if engine.tokens_per_second is None else f"{engine.tokens_per_second:,.0f} tokens/s"
    facts = [
        ("speed", speed),
        ("queued", _count(engine.queued)),
        ("in the engine", _count(engine.sessions)),
        ("lost groups", f"{_count(engine.lost_groups)} ({_count(engine.replayed_tokens)} tokens again)"),
        *more,
    ]
    ranks = [
        (
            str(rank.rank),
            rank.phase,
            f"{rank.step:,}",
            ("late " if rank.heartbeat_age_seconds > LATE_S else "") + duration(rank.heartbeat_age_seconds),
            duration(rank.progress_age_seconds),
            byte_size(rank.peak_rss_bytes),
            str(rank.pid),
        )
        for rank in engine.ranks
    ]
    header = ("rank", "phase", "step", "heartbeat", "progress", "peak memory", "pid")
    about = f"{engine.model}, {engine.backend or '-'}, epoch {_count(engine.epoch)}, step {_count(engine.step)}"
    parts: list[RenderableType] = [Text(about), rich_table(Table("", facts), boxed=True)]
    if ranks:
        parts.append(rich_table(Table("", ranks, header), boxed=True))
    return parts


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"

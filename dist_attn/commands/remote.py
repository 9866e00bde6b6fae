"""Commands on a running service (`--url`): the same output as here, by the HTTP client; never loads torch."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dist_attn.commands.progress import bytes_progress
from dist_attn.commands.row_file import row_file
from dist_attn.commands.tables import Table, byte_size, duration, print_tables
from dist_attn.costs import parse_count
from dist_attn.errors import InputError
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.row_choice import RowsAsked
from dist_attn_client import Client, Estimate, Retry
from dist_attn_client.texts import Sampling

__all__ = ["KEY_VARIABLE", "encode_remotely", "generate_remotely", "key_of_environment", "plan_remotely", "reached"]

KEY_VARIABLE = "DIST_ATTN_API_KEY"
FIRST_ANSWER_S = 30.0


def key_of_environment() -> str | None:
    """The key for services: in the environment, as other users of a machine see the flags of a command."""
    return os.environ.get(KEY_VARIABLE) or None


def reached(url: str) -> Client:
    """A client of a service that has answered once: a wrong address or key is told at once, not after all tries.

    Raises: InputError for a URL that is none, KeyRefused, Unreachable, ClientError.
    """
    key = key_of_environment()
    with Client(url, key=key, retry=Retry(tries=1), silence_s=FIRST_ANSWER_S) as first:
        first.models()
    return Client(url, key=key)


def encode_remotely(url: str, source: Path, target: Path, asked: RowsAsked) -> dict[str, Any]:
    """Write the rows that a service makes of a file (.npy, float32 [rows, dim]); a report in plain values.

    A lost connection goes on with the next row. The target appears only when it is complete.

    Raises: InputError for a file that cannot be read or written, ClientError.
    """
    started = time.perf_counter()
    size = source.stat().st_size if os.path.isfile(source) else 0
    with reached(url) as client, row_file(target, source) as rows:
        with bytes_progress(("sending", "encoding"), size) as (sent, encoded):
            stream = client.encode(
                source, granularity=asked.granularity, window=asked.window, pooling=asked.pooling, model=asked.model,
                on_progress=lambda progress: sent(progress.sent_bytes),
            )  # fmt: skip
            for row in stream:
                rows.write(row.embedding[None])
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


def generate_remotely(
    url: str, prompt: bytes, spec: SamplingSpec, *, model: str | None, on_text: Callable[[str], None]
) -> dict[str, Any]:
    """Let a service continue a text; a report in plain values. `on_text` gets each piece as it is drawn.

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
    """Print what a service thinks that reading `tokens` (like 2M) would cost it now.

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

"""`dist-attn top`: what a service and its ranks are doing, live on a terminal, as plain lines anywhere else."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dist_attn.commands.remote import KEY_VARIABLE, key_of_environment
from dist_attn.commands.tables import Table, byte_size, duration, rich_table
from dist_attn_client import Client, ClientError, KeyRefused, Status
from dist_attn_client.attempts import Retry

__all__ = ["plain_lines", "top"]

EVERY_S = 1.0
PATIENCE_S = 5.0
LATE_S = 2.0  # a heartbeat that is older is shown as late
FIGURES = (
    "model", "backend", "epoch", "step", "queued", "sessions", "tokens_per_second", "open_requests", "waiting_requests",
    "spool_bytes", "stored_sessions", "stored_states", "stored_bytes", "lost_groups", "replayed_tokens",
    "uptime_seconds", "version",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """What a service answered, or why it did not."""

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
    """Names and values with tabs between them; a rank's line has names and values in turn."""
    status = look.status
    if status is None:
        return ["ready\tno", f"reason\t{_line(look.problem)}"]
    lines = [f"ready\t{'yes' if status.ready else 'no'}", f"reason\t{_line(status.reason)}"]
    lines += [f"{name}\t{_value(getattr(status, name))}" for name in FIGURES]
    for rank in status.ranks:
        fields = msgspec.structs.asdict(rank)
        lines.append("\t".join(f"{name}\t{_value(value)}" for name, value in fields.items()))
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
    speed = "-" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f} tokens/s"
    facts = [
        ("speed", speed),
        ("queued", _count(status.queued)),
        ("in the engine", _count(status.sessions)),
        ("open requests", f"{status.open_requests:,} ({status.waiting_requests:,} waiting)"),
        ("stored sessions", f"{status.stored_sessions:,} ({byte_size(status.stored_bytes)})"),
        ("lost groups", f"{_count(status.lost_groups)} ({_count(status.replayed_tokens)} tokens again)"),
        ("up", duration(status.uptime_seconds)),
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
        for rank in status.ranks
    ]
    header = ("rank", "phase", "step", "heartbeat", "progress", "peak memory", "pid")
    about = f"{status.model}, {status.backend or '-'}, epoch {_count(status.epoch)}, step {_count(status.step)}"
    parts: list[RenderableType] = [head, Text(about), rich_table(Table("", facts), boxed=True)]
    if ranks:
        parts.append(rich_table(Table("", ranks, header), boxed=True))
    parts.append(Text(f"Ctrl-C ends it; a key goes into {KEY_VARIABLE}", style="dim"))
    return Group(*parts)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"

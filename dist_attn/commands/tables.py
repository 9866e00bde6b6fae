"""Tables for people on stdout: boxes and colour on a terminal, plain aligned text anywhere else or with NO_COLOR."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

__all__ = ["Table", "byte_size", "duration", "print_tables", "rich_table", "stdout_console"]

WIDE = 10_000  # where output is no terminal, no line is wrapped or cut


@dataclass(frozen=True)
class Table:
    """A title and rows of cells; the columns `texts` hold words, the others numbers."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    texts: Sequence[int] = (0,)


def print_tables(heading: str, tables: Sequence[Table], notes: Sequence[str] = ()) -> None:
    """Print a heading, the tables and the notes below them."""
    console = stdout_console()
    console.print(Text(heading, style="bold"), soft_wrap=True)
    for table in tables:
        console.print()
        console.print(Text(table.title, style="bold"))
        console.print(rich_table(table, boxed=console.is_terminal))
    if notes:
        console.print()
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)


def stdout_console() -> Console:
    """A console on stdout; plain with NO_COLOR or where stdout is no terminal, and there it does not wrap lines."""
    terminal = sys.stdout.isatty()
    styled = terminal and not os.environ.get("NO_COLOR")
    return Console(force_terminal=styled, width=None if terminal else WIDE, highlight=False)


def byte_size(count: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as people say them, in the unit that fits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


def rich_table(table: Table, *, boxed: bool) -> RichTable:
    """The table as rich draws it; its title is the caller's to draw."""
    result = RichTable(
        box=box.ROUNDED if boxed else None,
        show_header=bool(table.header),
        pad_edge=boxed,
    )
    for number in range(max(len(row) for row in table.rows)):
        header = table.header[number] if number < len(table.header) else ""
        result.add_column(header, justify="left" if number in table.texts else "right", no_wrap=number == 0)
    for row in table.rows:
        result.add_row(*(Text(cell) for cell in row))
    return result

"""Code blocks of README.md, docs/ and papers/docs/, and how a test runs each, or why none can.

`make docs-blocks` (`python -m tests.docs.blocks`) prints the list.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its place among the page's blocks from 1, the language that it names, what it holds."""

    page: str
    number: int
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        """What a test is called by."""
        return f"{self.page}#{self.number}"


@dataclass(frozen=True)
class Run:
    """A block that a test runs.

    how      python: as a program; shell: the commands behind `$ `; syntax: read by bash and not run; settings: a file
             of settings; section: keys of a section of a training file; mixer: a mixer of a model file; answer: one of
             the service, read by the client's own types.
    of       the section, or the type of the answer.
    before   Python that runs first, as what the page calls given.
    instead  what is put in the place of what: sizes, and what a reader fills in.
    leave    beginnings of commands that are not run, with the reason.
    says     what it prints, among other things.
    """

    how: Literal["python", "shell", "syntax", "settings", "section", "mixer", "answer"]
    of: str = ""
    before: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    leave: Mapping[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """A line for people."""
        left = "; ".join(f"not {command!r}: {reason}" for command, reason in self.leave.items())
        return f"run ({self.how})" + (f"; {left}" if left else "")


@dataclass(frozen=True)
class Elsewhere:
    """A block that a test of its own runs or stands for."""

    test: str

    @property
    def words(self) -> str:
        """A line for people."""
        return f"by {self.test}"


@dataclass(frozen=True)
class Not:
    """A block that no test here can run, or that is no code."""

    why: str

    @property
    def words(self) -> str:
        """A line for people."""
        return f"not run: {self.why}"


Treatment = Run | Elsewhere | Not


def pages() -> list[Path]:
    """All pages whose links and blocks are looked at; those of the reference are written from the code."""
    papers = [ROOT / "papers/README.md", *sorted((ROOT / "papers/docs").glob("*.md"))]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *papers]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    found = enumerate(_BLOCK.finditer(text), 1)
    return [Block(name, number, text.count("\n", 0, m.start()) + 1, m[1], m[2]) for number, m in found]


def commands_of(code: str) -> list[str]:
    """The commands of a console block, with the lines that go on with them; what they print is left out."""
    commands: list[str] = []
    goes_on = False
    for line in code.splitlines():
        if line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
        elif goes_on:
            commands[-1] += f"\n{line}"
        goes_on = (line.startswith("$ ") or goes_on) and line.endswith("\\")
    return commands


def main() -> int:
    """Print every block with what is done with it; 1 where the table and the pages differ."""
    from tests.docs.block_table import BLOCKS

    missing = 0
    for page in pages():
        found = blocks_of(page)
        treatments = BLOCKS.get(page.relative_to(ROOT).as_posix(), ())
        missing += len(found) != len(treatments)
        for number, block in enumerate(found):
            words = treatments[number].words if number < len(treatments) else "NOT IN tests/docs/block_table.py"
            print(f"{block.page}:{block.line}  {block.language or 'text'}  {words}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

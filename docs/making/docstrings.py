"""An extension of griffe: docstrings are shown as this project writes them.

Labelled parts (`Shapes: …`, `Raises: …`) become paragraphs, and lines of a name, blanks and words become lists.
"""

import re
from typing import Any, final

from griffe import Extension, Object

__all__ = ["LabelledParts", "as_markdown"]

_LABEL = re.compile(r"^(Shapes?|Units|Raises|Returns|References?|Cost|Memory|Example):(?=\s)", re.MULTILINE)
_ENTRY = re.compile(r"^( *)([\w\[\](){}.,*+ -]{1,40}?) {2,}(?=\S)(.*)$")


@final
class LabelledParts(Extension):
    """Rewrites every docstring that is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every module, class, function and value that is read."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The docstring with labels in bold and lists as lists."""
    lines: list[str] = []
    indent: int | None = None  # of the list that is under way
    for line in text.splitlines():
        entry = None if line.lstrip().startswith(("|", "*", ">>>")) else _ENTRY.match(line)
        if entry is not None and entry[2].strip():
            lines += [] if indent is not None else [""]
            indent = len(entry[1])
            lines.append(f"* `{entry[2].strip()}` {entry[3]}")
        elif indent is not None and line.strip() and len(line) - len(line.lstrip()) > indent:
            lines.append(f"    {line.strip()}")
        else:
            lines += [""] if indent is not None and line.strip() else []
            indent = None
            lines.append(line)
    return _LABEL.sub(r"\n**\1.**", "\n".join(lines))

"""`python -m tests.adapters.context_parallel_table`: the page of gradients over ranks, measured where it is written."""

import re
from pathlib import Path

from tests.adapters.test_context_parallel import (
    TOTAL,
    alone,
    computed_again,
    errors,
    ids,
    in_segments,
    of_the_middle_document,
    one_by_one,
    over_ranks,
    packed,
    unsegmented,
)
from tests.support.foreign_models import TYPES

__all__ = ["PAGE", "listed"]

PAGE = Path(__file__).resolve().parents[2] / "docs/measurements/context-parallel.md"
HEAD = """\
# Gradients over ranks

<!-- Written by `python -m tests.adapters.context_parallel_table`; a test compares its list of types with the code. -->

The largest difference of any parameter's gradient from one process of transformers, relative to that gradient's largest
number plus 1e-4, in float32 on CPUs: small random models, one text of 61 tokens. Columns are over three
ranks of 17, 0 and 44 tokens but the first, and the last: two ranks and a text in two segments, with gradients through
the state between them.

|type|one rank|17, 0 and 44 tokens|documents packed|gradient of other documents|computed again|from a state|
|---|---|---|---|---|---|---|
"""


def listed(page: str) -> list[str]:
    """The types that the page has a row for."""
    return re.findall(r"^\|`(\w+)`\|", page, re.MULTILINE)


def _row(kind: str) -> str:
    text = [{"input_ids": ids(), "labels": ids()}]
    pairs = [
        (over_ranks(kind, text, lengths=(TOTAL,)), alone(kind)),
        (over_ranks(kind, text), alone(kind)),
        (over_ranks(kind, [packed()]), one_by_one(kind)),
        (over_ranks(kind, text, computed_again), alone(kind)),
        (in_segments(kind, detach=False), unsegmented(kind)),
    ]
    cells = [f"{max(errors(got, want).values()):.0e}" for (_, got), (_, want) in pairs]
    leak = of_the_middle_document(kind)[1].max().item()
    cells.insert(3, "0" if leak == 0 else f"**{leak:.0e}**")
    return f"|`{kind}`|{'|'.join(cells)}|\n"


if __name__ == "__main__":
    PAGE.write_text(HEAD + "".join(map(_row, TYPES)))
